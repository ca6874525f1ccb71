"""Route /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.output.outputs import CompletionOutput, RequestOutput
from sidestep.frontend.parsers.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
)
from sidestep.frontend.server.openai.answer import Answer, Encode, Ending
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
from sidestep.frontend.server.openai.encoding import EventEncoder, IdsOfChoice
from sidestep.frontend.server.openai.prompt import PromptOptions, render
from sidestep.frontend.server.openai.tool_use import AnswerReader, ToolUse
from sidestep.frontend.server.schemas.fields import refuse_not_yet, sampling_params
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
    Usage,
)
from sidestep.frontend.server.schemas.structure import form_of
from sidestep.frontend.server.service.queue_events import asks_for_queue
from sidestep.frontend.server.service.service import Service, new_id
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
            service=service,
            name=name,
            model=model,
            choices=choices,
            n=len(choices),
            with_ids=bool(request.return_token_ids),
            parsers=parsers,
            reader=self._reader,
        )
        return await answer.respond(http, request, in_queue=in_queue)


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


@dataclass(kw_only=True, eq=False)
class ChatAnswer(Answer):
    """Answer to one chat."""

    event_object = "chat.completion.chunk"
    content_key = "delta"
    parsers: Sequence[AnswerParser | None]
    """One for each choice; None if the choice is text alone."""
    reader: AnswerReader

    def _body(self, outputs: Sequence[RequestOutput], usage: Usage) -> ChatCompletion:
        body = ChatCompletion(
            id=self.name,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, output) for i, output in enumerate(outputs)],
            usage=usage,
        )
        if (asked := outputs[0].prompt_logprobs) is not None:
            body.prompt_logprobs = prompt_logprobs(asked)
        if self.with_ids:
            body.prompt_token_ids = list(outputs[0].prompt_token_ids)
        return body

    def _choice(self, index: int, output: RequestOutput) -> ChatChoice:
        completion, parser = output.outputs[0], self.parsers[index]
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
        if self.with_ids:
            choice.token_ids = list(completion.token_ids)
        return choice

    def _logprobs(self, index: int, tokens: Sequence[Entries] | None) -> ChatLogprobs | None:
        most = self.choices[index].params.logprobs
        if most is None or not tokens:
            return None
        return ChatLogprobs(content_logprobs(self.service.llm.get_tokenizer(), tokens, most))

    def _message(self, events: Sequence[Event]) -> AnswerMessage:
        content, reasoning, calls = "", "", list[ToolCall]()
        for event in events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegin):
                calls.append(
                    ToolCall(id=self.reader.new_call_id(), function=FunctionCall(event.name, ""))
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

    def _makers(self, index: int, encoder: EventEncoder, ids: IdsOfChoice) -> tuple[Encode, Ending]:
        parser = self.parsers[index]
        deltas = None if parser is None else _Deltas(self.reader)
        untold, has_begun = list[Entries](), False

        def make_new(output: RequestOutput) -> bytes:
            nonlocal has_begun
            events, completion = b"", output.outputs[0]
            if not has_begun:
                has_begun, prompt = True, ids.of_prompt(output.prompt_token_ids)
                events = encoder.delta(Delta(role="assistant", content=""), None, prompt)
            untold.extend(completion.logprobs or ())
            if deltas is None or parser is None:
                if completion.text:
                    logprobs = self._logprobs(index, untold)
                    events += encoder.content(completion.text, logprobs, ids.take())
                    untold.clear()
            else:
                found = parser.feed(completion.text)
                for event in found + (parser.finish() if output.finished else []):
                    # The first event that a token gives carries its logprobs and its id.
                    events += encoder.delta(
                        deltas.of(event), self._logprobs(index, untold), ids.take()
                    )
                    untold.clear()
            return events

        def ending(completion: CompletionOutput) -> tuple[FinishWord, ChatLogprobs | None]:
            word = _finish_word(completion.finish_reason, bool(deltas and deltas.num_calls))
            return word, self._logprobs(index, untold)

        return make_new, ending


class _Deltas:
    """Convert the events of a parser to the deltas of a stream."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.num_calls = 0

    def of(self, event: Event) -> Delta:
        """Return the delta of an event."""
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
