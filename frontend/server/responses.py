"""/v1/responses: OpenAI's newer API, for text. An answer is a list of items; a stream tells how each grows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.chat_template import Message
from sidestep.frontend.outputs import RequestOutput
from sidestep.frontend.parsers.events import AnswerParser, Content, Event, Reasoning, ReasoningParser
from sidestep.frontend.server.body import decode
from sidestep.frontend.server.choice_stream import Encode, events_of, writer_of
from sidestep.frontend.server.connection import EventStream, while_connected
from sidestep.frontend.server.errors import ApiError, refused
from sidestep.frontend.server.fields import refuse_not_yet, sampling_params
from sidestep.frontend.server.logprobs import content_logprobs
from sidestep.frontend.server.protocol import ContentLogprob, PromptDetails
from sidestep.frontend.server.responses_protocol import (
    RESPONSES_NOT_YET,
    IncompleteDetails,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    TextConfig,
)
from sidestep.frontend.server.service import Choice, Service, new_id
from sidestep.frontend.server.structure import after_reasoning, form_of_text
from sidestep.ipc.registry import REASONING_PARSERS, load
from sidestep.ipc.sampling_params import RequestOutputKind

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


class ResponsesRoute:
    """Answers for one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        name = service.args.reasoning_parser
        self._make_reasoning: Callable[[str], ReasoningParser] | None = load(REASONING_PARSERS[name]) if name else None

    async def __call__(self, http: Request, body: bytes) -> Response:
        service, request = self._service, decode(body, _decoder)
        model = service.check_model(request.model)
        refuse_not_yet(request, RESPONSES_NOT_YET)
        prompt = service.llm.get_tokenizer().render_chat(_messages(request))
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        form = form_of_text(request.text.format if request.text is not None else None)
        if form is not None and self._make_reasoning is not None:
            form = after_reasoning(form, self._make_reasoning(prompt))
        params = sampling_params(request, request.max_output_tokens, output_kind=kind,
                                 logprobs=self._num_logprobs(request),
                                 structured_outputs=None if form is None else form.params)
        if form is not None:
            await form.check(service.llm)
        ids = await service.llm.tokenize(prompt, add_special_tokens=False)
        service.check_length("input", ids)
        name = new_id("resp")
        (choice,) = service.choices(http, name, [ids], params, priority=request.priority, salt=request.cache_salt,
                                    deadline_ms=request.deadline_ms)
        answer = ResponsesAnswer(
            id=name, created_at=int(time.time()), model=model, status="in_progress",
            instructions=request.instructions, max_output_tokens=request.max_output_tokens,
            temperature=params.temperature, top_p=params.top_p, top_logprobs=request.top_logprobs or 0)
        if request.text is not None and request.text.format is not None:
            answer.text = TextConfig(request.text.format)
        parser = AnswerParser(self._make_reasoning(prompt) if self._make_reasoning else None, None)
        if request.stream:
            events = _Events()
            encode = _encode_events(service, choice, answer, parser, events)
            stream = events_of(service, choice, encode, writer_of(http))
            return EventStream(stream, {"x-request-id": name}, events.error)
        return await while_connected(_whole(service, choice, answer, parser), http.receive)


    def _num_logprobs(self, request: ResponsesRequest) -> int | None:
        """Raises ApiError."""
        field = "include" if request.include else "top_logprobs" if request.top_logprobs else None
        if field is None:
            return None
        if self._make_reasoning is not None:
            raise refused(field, "logprobs of a model's answer alone are not told by this server, which tells its "
                          "reasoning apart", "unsupported_field")
        return request.top_logprobs or 0


def _messages(request: ResponsesRequest) -> list[Message]:
    """As templates read them."""
    made: list[Message] = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        return [*made, {"role": "user", "content": request.input}]
    for message in request.input:
        role = "system" if message.role == "developer" else message.role
        content = message.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        made.append({"role": role, "content": text})
    return made


async def _whole(service: Service, choice: Choice, answer: ResponsesAnswer, parser: AnswerParser) -> Response:
    (output,) = await service.whole([choice])
    items = _Items()
    for event in parser.feed(output.outputs[0].text) + parser.finish():
        items.add(event)
    items.close(answer)
    _add_logprobs(items, _logprobs(service, choice, output))
    _complete(answer, output)
    return Response(_encode(answer), media_type="application/json", headers={"x-request-id": answer.id})


def _logprobs(service: Service, choice: Choice, output: RequestOutput) -> list[ContentLogprob]:
    """Of what is new in an output; none if they are not asked for."""
    return content_logprobs(service.llm.get_tokenizer(), output.outputs[0].logprobs or (), choice.params.logprobs or 0)


def _add_logprobs(items: _Items, logprobs: list[ContentLogprob]) -> None:
    """To the last item, which is the only one that has any."""
    part = items.made[-1].content[0]
    if logprobs and isinstance(part, OutputText):
        part.logprobs = [*(part.logprobs or ()), *logprobs]


def _complete(answer: ResponsesAnswer, output: RequestOutput) -> None:
    """How it ended."""
    completion, prompt = output.outputs[0], len(output.prompt_token_ids)
    generated = output.metrics.num_generation_tokens
    answer.status = "completed" if completion.finish_reason == "stop" else "incomplete"
    if completion.finish_reason != "stop":
        reason = "max_output_tokens" if completion.finish_reason == "length" else str(completion.stop_reason or "abort")
        answer.incomplete_details = IncompleteDetails(reason)
        if answer.output:
            answer.output[-1].status = "incomplete"
    answer.usage = ResponsesUsage(
        input_tokens=prompt, input_tokens_details=PromptDetails(output.num_cached_tokens or 0),
        output_tokens=generated, total_tokens=prompt + generated)


class _Items:
    """The answer's items; one for each stretch of reasoning and of text."""

    def __init__(self) -> None:
        self.made: list[Item] = []

    def opens(self, event: Event) -> bool:
        """Whether this event begins a new item."""
        kind = ReasoningItem if isinstance(event, Reasoning) else MessageItem
        return not self.made or not isinstance(self.made[-1], kind)

    def add(self, event: Event) -> None:
        """One more event."""
        assert isinstance(event, Content | Reasoning)
        if self.opens(event):
            self.made.append(_new_item(isinstance(event, Reasoning)))
        self.made[-1].content[0].text += event.text

    def close(self, answer: ResponsesAnswer) -> None:
        """All of them belong to the answer, which has a message in any case."""
        if not self.made or not isinstance(self.made[-1], MessageItem):
            self.made.append(_new_item(False))
        for item in self.made:
            item.status = "completed"
        answer.output = self.made


def _new_item(is_reasoning: bool) -> Item:
    name = uuid.uuid4().hex
    if is_reasoning:
        return ReasoningItem(id=f"rs_{name}", status="in_progress", content=[ReasoningText(text="")])
    return MessageItem(id=f"msg_{name}", status="in_progress", content=[OutputText(text="")])


class _Events:
    """Numbered events."""

    def __init__(self) -> None:
        self._number = -1

    def make(self, kind: str, **fields: Any) -> bytes:
        """One event."""
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (
            kind.encode(), _encode({"type": kind, **fields, "sequence_number": self._number}))

    def error(self, error: ApiError) -> bytes:
        """What ends a stream that cannot go on."""
        detail = error.body.error
        return self.make("error", code=detail.code, message=detail.message, param=detail.param)


def _encode_events(service: Service, choice: Choice, answer: ResponsesAnswer, parser: AnswerParser,
                   events: _Events) -> Encode:
    """What makes the events of each output."""
    items, untold = _Items(), list[ContentLogprob]()
    before = events.make("response.created", response=answer) + events.make("response.in_progress", response=answer)

    def encode(output: RequestOutput) -> bytes:
        nonlocal before
        data, before = before, b""
        untold.extend(_logprobs(service, choice, output))
        for event in parser.feed(output.outputs[0].text) + (parser.finish() if output.finished else []):
            assert isinstance(event, Content | Reasoning)
            if items.opens(event):
                data += _closing(items, events)
                items.add(event)
                data += _opening(items, events)
            else:
                items.add(event)
            data += events.make(f"response.{_kind(items.made[-1])}.delta", delta=event.text,
                                **_of_text(items, untold), **_place(items))
            _add_logprobs(items, untold)
            untold.clear()
        return data + _ending(answer, items, untold, events, output) if output.finished else data

    return encode


def _ending(answer: ResponsesAnswer, items: _Items, untold: list[ContentLogprob], events: _Events,
            output: RequestOutput) -> bytes:
    """The events after the last text."""
    data = b""
    if not items.made or not isinstance(items.made[-1], MessageItem):
        data += _closing(items, events)
        items.made.append(_new_item(False))
        data += _opening(items, events)
    _add_logprobs(items, untold)
    data += _closing(items, events)
    items.close(answer)
    _complete(answer, output)
    return data + events.make(f"response.{answer.status}", response=answer)


def _kind(item: Item) -> str:
    return "reasoning_text" if isinstance(item, ReasoningItem) else "output_text"


def _of_text(items: _Items, logprobs: list[ContentLogprob]) -> dict[str, Any]:
    """What the events of an answer's text have besides."""
    return {"logprobs": logprobs} if isinstance(items.made[-1], MessageItem) else {}


def _place(items: _Items) -> dict[str, Any]:
    return {"item_id": items.made[-1].id, "output_index": len(items.made) - 1, "content_index": 0}


def _opening(items: _Items, events: _Events) -> bytes:
    """The events before an item's text. The item has its first text already; they say that it has none."""
    item, is_reasoning = items.made[-1], isinstance(items.made[-1], ReasoningItem)
    empty = _new_item(is_reasoning)
    empty.id = item.id
    part = empty.content[0]
    empty.content = []
    return (events.make("response.output_item.added", output_index=len(items.made) - 1, item=empty)
            + events.make("response.content_part.added", part=part, **_place(items)))


def _closing(items: _Items, events: _Events) -> bytes:
    """The events after an item's text."""
    if not items.made:
        return b""
    item = items.made[-1]
    item.status = "completed"
    part = item.content[0]
    return (events.make(f"response.{_kind(item)}.done", text=part.text,
                        **_of_text(items, getattr(part, "logprobs", None) or []), **_place(items))
            + events.make("response.content_part.done", part=part, **_place(items))
            + events.make("response.output_item.done", output_index=len(items.made) - 1, item=item))
