"""Route /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.parsers.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from sidestep.frontend.server.openai.answer_logprobs import (
    Entries,
    content_logprobs,
    prompt_logprobs,
)
from sidestep.frontend.server.openai.chat_protocol import (
    ChatRequest,
    max_tokens_of,
    num_logprobs_of,
    template_messages,
    tool_use_of,
)
from sidestep.frontend.server.openai.choice_stream import Encode, events_of, writer_of
from sidestep.frontend.server.openai.encoding import EventEncoder, IdsOfChoice, usage_event
from sidestep.frontend.server.openai.prompt import PromptOptions, render
from sidestep.frontend.server.openai.tool_use import AnswerReader, ToolUse
from sidestep.frontend.server.schemas.fields import StreamOptions, refuse_not_yet, sampling_params
from sidestep.frontend.server.schemas.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishWord,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from sidestep.frontend.server.schemas.structure import form_of
from sidestep.frontend.server.service.queue_events import asks_for_queue
from sidestep.frontend.server.service.service import Choice, Service, new_id, usage_of
from sidestep.frontend.server.transport.connection import DONE, EventStream, merged, while_connected
from sidestep.frontend.server.transport.http_protocol import BodyWriter
from sidestep.ipc.params.sampling_params import RequestOutputKind

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatRoute:
    """Route that answers chats."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader = AnswerReader(service)

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer a chat, as one body or as a stream. Raises ApiError and ValidationError."""
        service, size = self._service, len(body)
        request = await service.large.decode(body, _decoder)
        model = service.check_model(request.model)
        in_queue = asks_for_queue(http, bool(request.stream))
        refuse_not_yet(request)
        use = await service.large.run(size, tool_use_of, request)
        self._reader.check(use)
        prompt = await service.large.run(size, _render, service, request, use)
        parsers = [self._reader.parser(prompt, use) for _ in range(request.n or 1)]
        asked = form_of(request.response_format, request.structured_outputs)
        form = await service.large.run(size, self._reader.form, asked, use, prompt)
        params = sampling_params(
            request,
            max_tokens_of(request),
            service.llm.sampling_defaults,
            logprobs=num_logprobs_of(request),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if form is None else form.params,
            **self._reader.sampling(use, request.skip_special_tokens),
        )
        if form is not None:
            await form.check(service.llm)
        # The template writes the special tokens itself.
        ids = await service.tokenize(
            "messages", prompt, add_special_tokens=request.add_special_tokens is True
        )
        name = new_id("chatcmpl")
        choices = service.choices(http, name, [ids], params, request, n=request.n)
        answer = ChatAnswer(
            service, name, model, choices, parsers, self._reader, bool(request.return_token_ids)
        )
        if not request.stream:
            return await while_connected(answer.whole(), http.receive)
        events = answer.events(request.stream_options or StreamOptions(), writer_of(http))
        if in_queue:
            events = service.queue.events(events, choices[0].request_id)
        return EventStream(events, {"x-request-id": name}, comment_s=service.args.stream_comments)


def _render(service: Service, request: ChatRequest, use: ToolUse | None) -> str:
    """Return the prompt of the conversation. Raises ApiError and ValidationError."""
    return render(
        service,
        template_messages(request.messages),
        PromptOptions(
            variables=request.chat_template_kwargs,
            tools=None if use is None else use.for_template(),
            effort=request.reasoning_effort,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        ),
    )


class ChatAnswer:
    """Answer to one request, as one body or as a stream."""

    def __init__(
        self,
        service: Service,
        name: str,
        model: str,
        choices: Sequence[Choice],
        parsers: Sequence[AnswerParser | None],
        reader: AnswerReader,
        with_ids: bool,
    ) -> None:
        """Begin an answer.

        parsers: one for each choice. with_ids: send token ids beside the text.
        """
        self._service = service
        self._name = name
        self._model = model
        self._choices = choices
        self._parsers = parsers
        self._reader = reader
        self._with_ids = with_ids
        self._created = int(time.time())
        self._last: list[RequestOutput | None] = [None] * len(choices)

    async def whole(self) -> Response:
        """Return the answer as one body."""
        outputs = await self._service.whole(self._choices)
        choices = [self._choice(i, output) for i, output in enumerate(outputs)]
        body = ChatCompletion(
            id=self._name,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage_of(outputs, len(outputs)),
        )
        if (asked := outputs[0].prompt_logprobs) is not None:
            body.prompt_logprobs = prompt_logprobs(asked)
        if self._with_ids:
            body.prompt_token_ids = list(outputs[0].prompt_token_ids)
        return Response(
            msgspec.json.encode(body),
            media_type="application/json",
            headers={"x-request-id": self._name},
        )

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        completion, parser = output.outputs[0], self._parsers[index]
        message = AnswerMessage(content=completion.text)
        if parser is not None:
            message = self._message(parser.feed(completion.text) + parser.finish())
        reason = _finish_word(completion.finish_reason, bool(message.tool_calls))
        choice = ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(index, completion.logprobs),
            finish_reason=reason,
            stop_reason=completion.stop_reason,
        )
        if self._with_ids:
            choice.token_ids = list(completion.token_ids)
        return choice

    def _logprobs(self, index: int, tokens: Sequence[Entries] | None) -> ChatLogprobs | None:
        most = self._choices[index].params.logprobs
        if most is None or not tokens:
            return None
        return ChatLogprobs(content_logprobs(self._service.llm.get_tokenizer(), tokens, most))

    def _message(self, events: Sequence[Event]) -> AnswerMessage:
        content, reasoning, calls = "", "", list[ToolCall]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegin):
                calls.append(
                    ToolCall(id=self._reader.new_call_id(), function=FunctionCall(event.name, ""))
                )
            elif isinstance(event, CallArguments):
                calls[-1].function.arguments += event.text
            else:
                reasoning += event.text
        message = AnswerMessage(content=content if content or not calls else None)
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = calls
        return message

    def events(
        self, options: StreamOptions, writer: BodyWriter | None
    ) -> AsyncGenerator[bytes, None]:
        """Return the answer as server-sent events."""
        head: dict[str, object] = {
            "id": self._name,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
        }
        encoders = [
            EventEncoder(i, head, "delta", options.include_usage) for i in range(len(self._choices))
        ]

        def end() -> bytes:
            outputs = cast(list[RequestOutput], self._last)
            return (
                usage_event(head, usage_of(outputs, len(outputs))) + DONE
                if options.include_usage
                else DONE
            )

        if len(encoders) == 1:
            return events_of(
                self._service, self._choices[0], self._encode(0, encoders[0], options, end), writer
            )
        return merged(
            [
                events_of(self._service, self._choices[i], self._encode(i, encoder, options))
                for i, encoder in enumerate(encoders)
            ],
            end,
        )

    def _encode(
        self,
        index: int,
        encoder: EventEncoder,
        options: StreamOptions,
        end: Callable[[], bytes] | None = None,
    ) -> Encode:
        """Return a function that makes the events of one choice.

        end: makes the events that follow the last one of the choice.
        """
        parser = self._parsers[index]
        deltas = None if parser is None else _Deltas(self._reader)
        untold, ids, has_begun = list[Entries](), IdsOfChoice(self._with_ids), False

        def encode(output: RequestOutput) -> bytes:
            nonlocal has_begun
            if options.continuous_usage_stats:
                encoder.set_usage(usage_of([output], 1))
            event = (
                b""
                if has_begun
                else encoder.delta(
                    Delta(role="assistant", content=""),
                    None,
                    ids.of_prompt(output.prompt_token_ids),
                )
            )
            has_begun, completion = True, output.outputs[0]
            untold.extend(completion.logprobs or ())
            ids.add(completion.token_ids)
            if deltas is None or parser is None:
                if completion.text:
                    event += encoder.content(
                        completion.text, self._logprobs(index, untold), ids.take()
                    )
                    untold.clear()
            else:
                for delta in deltas.of(
                    parser.feed(completion.text) + (parser.finish() if output.finished else [])
                ):
                    # The first event that a token gives carries its logprobs and its id.
                    event += encoder.delta(delta, self._logprobs(index, untold), ids.take())
                    untold.clear()
            if output.finished:
                word = _finish_word(
                    completion.finish_reason, deltas is not None and deltas.num_calls > 0
                )
                event += encoder.end(
                    b"{}", word, completion.stop_reason, self._logprobs(index, untold), ids.take()
                )
                self._last[index] = output
                if end is not None:
                    event += end()
            return event

        return encode


class _Deltas:
    """Convert the events of a parser to the deltas of a stream."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.num_calls = 0

    def of(self, events: Sequence[Event]) -> list[Delta]:
        """Return one delta for each event."""
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> Delta:
        if isinstance(event, Content):
            return Delta(content=event.text)
        if isinstance(event, CallBegin):
            self.num_calls += 1
            return Delta(
                tool_calls=[
                    ToolCallDelta(
                        index=self.num_calls - 1,
                        id=self._reader.new_call_id(),
                        type="function",
                        function=FunctionDelta(event.name, ""),
                    )
                ]
            )
        if isinstance(event, CallArguments):
            return Delta(
                tool_calls=[
                    ToolCallDelta(
                        index=self.num_calls - 1, function=FunctionDelta(arguments=event.text)
                    )
                ]
            )
        return Delta(reasoning_content=event.text)


def _finish_word(reason: str | None, has_calls: bool) -> FinishWord:
    if reason == "stop" and has_calls:
        return "tool_calls"
    return cast(FinishWord, reason)
