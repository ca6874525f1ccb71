"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.outputs import RequestOutput
from sidestep.frontend.parsers.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    ReasoningParser,
    ToolParser,
)
from sidestep.frontend.server.body import decode
from sidestep.frontend.server.chat_protocol import (
    ChatRequest,
    NamedToolChoice,
    functions_of,
    max_tokens_of,
    num_logprobs_of,
    template_messages,
    tools_in_use,
)
from sidestep.frontend.server.choice_stream import Encode, events_of, writer_of
from sidestep.frontend.server.connection import DONE, EventStream, merged, while_connected
from sidestep.frontend.server.encoding import EventEncoder, usage_event
from sidestep.frontend.server.errors import refused
from sidestep.frontend.server.fields import StreamOptions, refuse_not_yet, sampling_params
from sidestep.frontend.server.http_protocol import BodyWriter
from sidestep.frontend.server.logprobs import Entries, content_logprobs, prompt_logprobs
from sidestep.frontend.server.protocol import (
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
from sidestep.frontend.server.service import Choice, Service, new_id, usage_of
from sidestep.frontend.server.structure import Form, after_reasoning, form_of, form_of_calls, form_of_strict_tools
from sidestep.ipc.registry import REASONING_PARSERS, TOOL_PARSERS, load
from sidestep.ipc.sampling_params import RequestOutputKind, SamplingParams

_decoder = msgspec.json.Decoder(ChatRequest)
MOST_CALLS = 16
"""Of an answer that must have some."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")


class ChatRoute:
    """Answers chats of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        args = service.args
        self._make_reasoning: Callable[[str], ReasoningParser] | None = \
            load(REASONING_PARSERS[args.reasoning_parser]) if args.reasoning_parser else None
        self._tools: type[ToolParser] | None = load(TOOL_PARSERS[args.tool_call_parser]) \
            if args.tool_call_parser else None

    async def __call__(self, http: Request, body: bytes) -> Response:
        service, request = self._service, decode(body, _decoder)
        model = service.check_model(request.model)
        refuse_not_yet(request)
        tools = tools_in_use(request)
        prompt = render(service, request, tools)
        self._check_tools(tools)
        parsers = [self._parser(prompt, tools) for _ in range(request.n or 1)]
        form = self._form(request, prompt)
        params = self._params(request, tools, form)
        if form is not None:
            await form.check(service.llm)
        # The template writes the special tokens itself.
        ids = await service.llm.tokenize(prompt, add_special_tokens=False)
        service.check_length("messages", ids)
        name = new_id("chatcmpl")
        choices = service.choices(http, name, [ids], params, n=request.n, priority=request.priority,
                                  salt=request.cache_salt, deadline_ms=request.deadline_ms)
        answer = ChatAnswer(service, name, model, choices, parsers, self._tools)
        if not request.stream:
            return await while_connected(answer.whole(), http.receive)
        events = answer.events(request.stream_options or StreamOptions(), writer_of(http))
        return EventStream(events, {"x-request-id": name})

    def _form(self, request: ChatRequest, prompt: str) -> Form | None:
        """What the answer must be. Raises ApiError."""
        form, choice, parser = form_of(request.response_format, request.structured_outputs), request.tool_choice, None
        if request.tools and choice != "none":
            parser = self._tools
        if parser is not None and form is not None:
            raise refused("tools", "cannot go with a form of the answer, which leaves no place for calls; "
                          "send tool_choice 'none'", "unsupported_field")
        if parser is not None:
            functions = functions_of(request)
            if choice == "required" or isinstance(choice, NamedToolChoice):
                most = MOST_CALLS if choice == "required" else 1
                special = self._service.llm.get_tokenizer().special_token_ids
                form = form_of_calls(parser, functions, most, special)
            elif any(tool.function.strict for tool in request.tools or ()):
                form = form_of_strict_tools(parser, functions)
        if form is None or self._make_reasoning is None:
            return form
        return after_reasoning(form, self._make_reasoning(prompt))

    def _params(self, request: ChatRequest, tools: Sequence[Any] | None, form: Form | None) -> SamplingParams:
        more: dict[str, Any] = {
            "logprobs": num_logprobs_of(request),
            "output_kind": RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            "structured_outputs": None if form is None else form.params}
        if tools and self._tools is not None and self._tools.special_tokens:
            # The parser's marks are special tokens. The one that ends the text is left out in any case.
            if request.skip_special_tokens:
                raise refused("skip_special_tokens", "this model's tool calls are told by special tokens")
            more["skip_special_tokens"] = False
        return sampling_params(request, max_tokens_of(request), **more)

    def _check_tools(self, tools: Sequence[Any] | None) -> None:
        """Raises ApiError when the model could not be told of tools, or its calls not be read."""
        if not tools:
            return
        if self._tools is None:
            raise refused("tools", "this server was started without --tool-call-parser", "unsupported_field")
        if "tools" not in (self._service.llm.get_tokenizer().chat_template or ""):
            raise refused("tools", "this model's chat template has no place for them", "unsupported_field")

    def _parser(self, prompt: str, tools: Sequence[Any] | None) -> AnswerParser | None:
        reasoning = self._make_reasoning(prompt) if self._make_reasoning else None
        calls = self._tools() if tools and self._tools else None
        return AnswerParser(reasoning, calls) if reasoning or calls else None


def render(service: Service, request: Any, tools: Sequence[Any] | None) -> str:
    """The prompt of a conversation. Raises ApiError and ValidationError."""
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    for name in _OWN_VARIABLES:
        if name in variables:
            raise refused(f"chat_template_kwargs.{name}", "is set by the request's other fields")
    messages = template_messages(request.messages)
    if tools:
        variables["tools"] = tools
    return service.llm.get_tokenizer().render_chat(messages, **variables)


class ChatAnswer:
    """The answer to one request, in its two forms."""

    def __init__(self, service: Service, name: str, model: str, choices: Sequence[Choice],
                 parsers: Sequence[AnswerParser | None], tools: type[ToolParser] | None) -> None:
        self._service = service
        self._name = name
        self._model = model
        self._choices = choices
        self._parsers = parsers
        self._tools = tools
        self._created = int(time.time())
        self._last: list[RequestOutput | None] = [None] * len(choices)

    async def whole(self) -> Response:
        """One body."""
        outputs = await self._service.whole(self._choices)
        choices = [self._choice(i, output) for i, output in enumerate(outputs)]
        body = ChatCompletion(id=self._name, created=self._created, model=self._model, choices=choices,
                              usage=usage_of(outputs, len(outputs)))
        if (asked := outputs[0].prompt_logprobs) is not None:
            body.prompt_logprobs = prompt_logprobs(asked)
        return Response(msgspec.json.encode(body), media_type="application/json",
                        headers={"x-request-id": self._name})

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        completion, parser = output.outputs[0], self._parsers[index]
        message = AnswerMessage(content=completion.text)
        if parser is not None:
            message = self._message(parser.feed(completion.text) + parser.finish())
        reason = _finish_word(completion.finish_reason, bool(message.tool_calls))
        return ChatChoice(index=index, message=message, logprobs=self._logprobs(index, completion.logprobs),
                          finish_reason=reason, stop_reason=completion.stop_reason)

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
                calls.append(ToolCall(id=_new_call_id(self._tools), function=FunctionCall(event.name, "")))
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

    def events(self, options: StreamOptions, writer: BodyWriter | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        head: dict[str, object] = {"id": self._name, "object": "chat.completion.chunk", "created": self._created,
                                   "model": self._model}
        encoders = [EventEncoder(i, head, "delta", options.include_usage) for i in range(len(self._choices))]

        def end() -> bytes:
            outputs = cast(list[RequestOutput], self._last)
            return usage_event(head, usage_of(outputs, len(outputs))) + DONE if options.include_usage else DONE

        if len(encoders) == 1:
            return events_of(self._service, self._choices[0], self._encode(0, encoders[0], options, end), writer)
        return merged([events_of(self._service, self._choices[i], self._encode(i, encoder, options))
                       for i, encoder in enumerate(encoders)], end)

    def _encode(self, index: int, encoder: EventEncoder, options: StreamOptions,
                end: Callable[[], bytes] | None = None) -> Encode:
        """What makes the events of one choice; `end` gives what follows the last of them."""
        parser = self._parsers[index]
        deltas = None if parser is None else _Deltas(self._tools)
        untold, has_begun = list[Entries](), False

        def encode(output: RequestOutput) -> bytes:
            nonlocal has_begun
            if options.continuous_usage_stats:
                encoder.set_usage(usage_of([output], 1))
            event = b"" if has_begun else encoder.delta(Delta(role="assistant", content=""))
            has_begun, completion = True, output.outputs[0]
            untold.extend(completion.logprobs or ())
            if deltas is None or parser is None:
                if completion.text:
                    event += encoder.content(completion.text, self._logprobs(index, untold))
                    untold.clear()
            else:
                for delta in deltas.of(parser.feed(completion.text) + (parser.finish() if output.finished else [])):
                    # Those of a token go with the first that comes of it.
                    event += encoder.delta(delta, self._logprobs(index, untold))
                    untold.clear()
            if output.finished:
                word = _finish_word(completion.finish_reason, deltas is not None and deltas.num_calls > 0)
                event += encoder.end(b"{}", word, completion.stop_reason, self._logprobs(index, untold))
                self._last[index] = output
                if end is not None:
                    event += end()
            return event

        return encode


class _Deltas:
    """What a parser finds, as the deltas of a stream."""

    def __init__(self, tools: type[ToolParser] | None) -> None:
        self._tools = tools
        self.num_calls = 0

    def of(self, events: Sequence[Event]) -> list[Delta]:
        """One delta for each event."""
        return [self._delta(event) for event in events]

    def _delta(self, event: Event) -> Delta:
        if isinstance(event, Content):
            return Delta(content=event.text)
        if isinstance(event, CallBegin):
            self.num_calls += 1
            return Delta(tool_calls=[ToolCallDelta(index=self.num_calls - 1, id=_new_call_id(self._tools),
                                                   type="function", function=FunctionDelta(event.name, ""))])
        if isinstance(event, CallArguments):
            return Delta(tool_calls=[ToolCallDelta(index=self.num_calls - 1,
                                                   function=FunctionDelta(arguments=event.text))])
        return Delta(reasoning_content=event.text)


def _new_call_id(tools: type[ToolParser] | None) -> str:
    assert tools is not None  # only it finds calls
    return tools.new_call_id()


def _finish_word(reason: str | None, has_calls: bool) -> FinishWord:
    if reason == "stop" and has_calls:
        return "tool_calls"
    return cast(FinishWord, reason)
