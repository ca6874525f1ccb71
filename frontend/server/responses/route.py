"""Route /v1/responses, OpenAI's newer API.

An answer is a list of items, and the events of a stream describe how each item grows.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.parsers.events import AnswerParser
from sidestep.frontend.server.openai.answer import Encode, events_of, writer_of
from sidestep.frontend.server.openai.answer_logprobs import content_logprobs
from sidestep.frontend.server.openai.prompt import PromptOptions, render
from sidestep.frontend.server.openai.tool_use import AnswerReader, ToolUse
from sidestep.frontend.server.responses.input_items import messages_of
from sidestep.frontend.server.responses.output_items import Events, Items
from sidestep.frontend.server.responses.protocol import (
    RESPONSES_NOT_YET,
    FlatToolChoice,
    IncompleteDetails,
    ReasoningOptions,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
    TextConfig,
)
from sidestep.frontend.server.schemas.fields import refuse_not_yet, refuse_unless, sampling_params
from sidestep.frontend.server.schemas.protocol import ContentLogprob, PromptDetails
from sidestep.frontend.server.schemas.structure import form_of_text
from sidestep.frontend.server.service.service import Choice, Service, new_id
from sidestep.frontend.server.transport.connection import EventStream, while_connected
from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.Encoder().encode


class ResponsesRoute:
    """Route that answers requests to /v1/responses."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader = AnswerReader(service)

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer a request, as one body or as a stream. Raises ApiError and ValidationError."""
        service, size = self._service, len(body)
        request = await service.large.decode(body, _decoder)
        model = service.check_model(request.model)
        _refuse_not_yet(request)
        use = await service.large.run(size, _tool_use, request)
        self._reader.check(use)
        prompt = await service.large.run(size, _render, service, request, use)
        asked = form_of_text(request.text.format if request.text is not None else None)
        form = await service.large.run(size, self._reader.form, asked, use, prompt)
        params = sampling_params(
            request,
            request.max_output_tokens,
            service.llm.sampling_defaults,
            logprobs=self._num_logprobs(request, use),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if form is None else form.params,
            **self._reader.sampling(use),
        )
        if form is not None:
            await form.check(service.llm)
        ids = await service.tokenize("input", prompt, add_special_tokens=False)
        name = new_id("resp")
        (choice,) = service.choices(http, name, [ids], params, request)
        parser = self._reader.parser(prompt, use) or AnswerParser(None, None)
        answer = ResponseAnswer(
            service, choice, _begun(name, model, request, params), parser, self._reader
        )
        if not request.stream:
            return await while_connected(answer.whole(), http.receive)
        events = Events()
        stream = events_of(service, choice, answer.events(events), writer_of(http))
        return EventStream(
            stream, {"x-request-id": name}, events.error, comment_s=service.args.stream_comments
        )

    def _num_logprobs(self, request: ResponsesRequest, use: ToolUse | None) -> int | None:
        """Return the number of most probable tokens per token; None without logprobs.

        Raises ApiError.
        """
        field = "include" if request.include else "top_logprobs" if request.top_logprobs else None
        if field is None:
            return None
        if self._reader.tells_reasoning or use is not None:
            raise refused(
                field,
                "logprobs of a model's answer alone are not told by this server, which tells its "
                "reasoning and calls apart",
                "unsupported_field",
            )
        return request.top_logprobs or 0


def _render(service: Service, request: ResponsesRequest, use: ToolUse | None) -> str:
    """Return the prompt of the conversation. Raises ApiError and ValidationError."""
    return render(
        service,
        messages_of(request),
        PromptOptions(
            variables=request.chat_template_kwargs,
            tools=None if use is None else use.for_template(),
            effort=None if request.reasoning is None else request.reasoning.effort,
            effort_field="reasoning.effort",
        ),
    )


def _refuse_not_yet(request: ResponsesRequest) -> None:
    refuse_not_yet(request, RESPONSES_NOT_YET)
    if request.reasoning is not None:
        for name in ("summary", "generate_summary"):
            refuse_unless(f"reasoning.{name}", getattr(request.reasoning, name))


def _tool_use(request: ResponsesRequest) -> ToolUse | None:
    choice = request.tool_choice
    # Clients of this route also send 'auto' with an empty list of tools.
    if not request.tools and choice == "auto":
        choice = None
    word, chosen = (None, choice.name) if isinstance(choice, FlatToolChoice) else (choice, None)
    return ToolUse.of(
        request.tools or (), word, chosen, request.parallel_tool_calls, "tool_choice.name"
    )


def _begun(
    name: str, model: str, request: ResponsesRequest, params: SamplingParams
) -> ResponsesAnswer:
    """Return the answer before its first item, with the fields of the request."""
    effort = None if request.reasoning is None else request.reasoning.effort
    given: dict[str, Any] = {
        key: value
        for key in (
            "metadata",
            "prompt_cache_key",
            "safety_identifier",
            "user",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        )
        if (value := getattr(request, key)) is not None
    }
    if request.text is not None and request.text.format is not None:
        given["text"] = TextConfig(request.text.format)
    return ResponsesAnswer(
        id=name,
        created_at=int(time.time()),
        model=model,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_logprobs=request.top_logprobs or 0,
        reasoning=None if effort is None else ReasoningOptions(effort=effort),
        **given,
    )


class ResponseAnswer:
    """The answer to one request, as one body or as a stream."""

    def __init__(
        self,
        service: Service,
        choice: Choice,
        answer: ResponsesAnswer,
        parser: AnswerParser,
        reader: AnswerReader,
    ) -> None:
        self._service = service
        self._choice = choice
        self._answer = answer
        self._parser = parser
        self._items = Items(reader.new_call_id)

    async def whole(self) -> Response:
        """Return the answer as one body."""
        (output,) = await self._service.whole([self._choice])
        items = self._items
        for event in self._parser.feed(output.outputs[0].text) + self._parser.finish():
            if items.opens(event):
                items.open(event)
            items.grow(event)
        if items.lacks_end():
            items.open(None)
        items.add_logprobs(self._logprobs(output))
        self._complete(output)
        return Response(
            _encode(self._answer),
            media_type="application/json",
            headers={"x-request-id": self._answer.id},
        )

    def events(self, events: Events) -> Encode:
        """Return a function that makes the events of each output."""
        items, untold = self._items, list[ContentLogprob]()
        before = b"".join(
            events.make(f"response.{kind}", response=self._answer)
            for kind in ("created", "in_progress")
        )

        def encode(output: RequestOutput) -> bytes:
            nonlocal before
            data, before = before, b""
            untold.extend(self._logprobs(output))
            found = self._parser.feed(output.outputs[0].text)
            for event in found + (self._parser.finish() if output.finished else []):
                if items.opens(event):
                    data += events.closing(items)
                    items.open(event)
                    data += events.opening(items)
                if text := items.grow(event):
                    data += events.growth(items, text, untold)
                    items.add_logprobs(untold)
                    untold.clear()
            return data + self._ending(untold, events, output) if output.finished else data

        return encode

    def _ending(self, untold: list[ContentLogprob], events: Events, output: RequestOutput) -> bytes:
        """Return the events after the last text."""
        data, items = b"", self._items
        if items.lacks_end():
            data += events.closing(items)
            items.open(None)
            data += events.opening(items)
        items.add_logprobs(untold)
        data += events.closing(items)
        self._complete(output)
        return data + events.make(f"response.{self._answer.status}", response=self._answer)

    def _logprobs(self, output: RequestOutput) -> list[ContentLogprob]:
        """Return the log-probabilities of an output's new tokens.

        The list is empty if the request does not ask for them.
        """
        return content_logprobs(
            self._service.llm.get_tokenizer(),
            output.outputs[0].logprobs or (),
            self._choice.params.logprobs or 0,
        )

    def _complete(self, output: RequestOutput) -> None:
        """Set the answer's final items, status and usage."""
        answer, completion, prompt = self._answer, output.outputs[0], len(output.prompt_token_ids)
        for item in self._items.made:
            item.status = "completed"
        answer.output = self._items.made
        generated = output.metrics.num_generation_tokens
        answer.status = "completed" if completion.finish_reason == "stop" else "incomplete"
        if completion.finish_reason != "stop":
            reason = (
                "max_output_tokens"
                if completion.finish_reason == "length"
                else str(completion.stop_reason or "abort")
            )
            answer.incomplete_details = IncompleteDetails(reason)
            answer.output[-1].status = "incomplete"
        answer.usage = ResponsesUsage(
            input_tokens=prompt,
            input_tokens_details=PromptDetails(output.num_cached_tokens or 0),
            output_tokens=generated,
            total_tokens=prompt + generated,
        )
