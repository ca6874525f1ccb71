"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Annotated, Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.outputs import RequestOutput
from sidestep.frontend.server.body import decode
from sidestep.frontend.server.choice_stream import Encode, events_of, writer_of
from sidestep.frontend.server.connection import DONE, EventStream, merged, while_connected
from sidestep.frontend.server.encoding import EventEncoder, usage_event
from sidestep.frontend.server.errors import refused
from sidestep.frontend.server.fields import Natural, SamplingFields, StreamOptions, refuse_not_yet, sampling_params
from sidestep.frontend.server.http_protocol import BodyWriter
from sidestep.frontend.server.protocol import Completion, CompletionChoice, FinishWord
from sidestep.frontend.server.service import Choice, Service, new_id, usage_of
from sidestep.ipc.sampling_params import RequestOutputKind

MAX_CHOICES = 1024
"""Prompts times n of one request."""
_DEFAULT_TOKENS = 16


PromptText = Annotated[str, msgspec.Meta(min_length=1)]
PromptIds = Annotated[list[Natural], msgspec.Meta(min_length=1)]


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /v1/completions."""

    prompt: PromptText | Annotated[list[PromptText | int | PromptIds], msgspec.Meta(min_length=1)]
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Repeat the prompt before the completion."""
    add_special_tokens: bool | None = None
    """Whether a text gets the tokens that the model puts around every text; true if not given."""
    # Not implemented: see fields.NOT_YET.
    best_of: Any = None
    suffix: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionRoute:
    """Completes prompts for one server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        service, request = self._service, decode(body, _decoder)
        model = service.check_model(request.model)
        refuse_not_yet(request)
        prompts = await self._read(request)
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        params = sampling_params(request, request.max_tokens or _DEFAULT_TOKENS, output_kind=kind)
        name, n = new_id("cmpl"), request.n or 1
        choices = service.choices(http, name, prompts, params, n=n, priority=request.priority,
                                  salt=request.cache_salt, deadline_ms=request.deadline_ms)
        echo = [self._text(ids) for ids in prompts] if request.echo else [""] * len(prompts)
        answer = CompletionAnswer(service, name, model, choices, n, echo)
        if not request.stream:
            return await while_connected(answer.whole(), http.receive)
        events = answer.events(request.stream_options or StreamOptions(), writer_of(http))
        return EventStream(events, {"x-request-id": name})

    async def _read(self, request: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises ApiError."""
        prompts = _prompts(request.prompt)
        if len(prompts) * (request.n or 1) > MAX_CHOICES:
            raise refused("prompt", f"{len(prompts)} prompts with n={request.n or 1} are more than {MAX_CHOICES} "
                          "choices")
        special, tokenize = request.add_special_tokens is not False, self._service.llm.tokenize
        ids = [await tokenize(p, add_special_tokens=special) if isinstance(p, str) else p for p in prompts]
        for prompt in ids:
            if not prompt:
                raise refused("prompt", "is empty")
            self._service.check_length("prompt", prompt)
        return ids

    def _text(self, ids: Sequence[int]) -> str:
        tokenizer = self._service.llm.get_tokenizer()
        if max(ids) >= tokenizer.vocab_size:
            raise refused("prompt", f"{max(ids)} is not a token id: the model has {tokenizer.vocab_size}")
        return tokenizer.decode(ids)


def _prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """One text or list of token ids for each prompt. Raises ApiError for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        if any(cast(int, item) < 0 for item in prompt):
            raise refused("prompt", "holds a negative number, which is not a token id")
        return [cast(list[int], prompt)]
    if not all(isinstance(item, str) for item in prompt) and not all(isinstance(item, list) for item in prompt):
        raise refused("prompt", "must be text, token ids, or a list of one of these")
    return cast(list[str | list[int]], prompt)


class CompletionAnswer:
    """The answer to one request, in its two forms."""

    def __init__(self, service: Service, name: str, model: str, choices: Sequence[Choice], n: int,
                 echo: Sequence[str]) -> None:
        """echo: for each prompt, what its completions begin with."""
        self._service = service
        self._name = name
        self._model = model
        self._choices = choices
        self._n = n
        self._echo = echo
        self._created = int(time.time())
        self._last: list[RequestOutput | None] = [None] * len(choices)

    async def whole(self) -> Response:
        """One body."""
        outputs = await self._service.whole(self._choices)
        choices = [
            CompletionChoice(index=i, text=self._echo[i // self._n] + output.outputs[0].text,
                             finish_reason=cast(FinishWord, output.outputs[0].finish_reason),
                             stop_reason=output.outputs[0].stop_reason)
            for i, output in enumerate(outputs)]
        body = Completion(id=self._name, created=self._created, model=self._model, choices=choices,
                          usage=usage_of(outputs, self._n))
        return Response(msgspec.json.encode(body), media_type="application/json",
                        headers={"x-request-id": self._name})

    def events(self, options: StreamOptions, writer: BodyWriter | None) -> AsyncGenerator[bytes, None]:
        """Server-sent events."""
        head: dict[str, object] = {"id": self._name, "object": "text_completion", "created": self._created,
                                   "model": self._model}
        encoders = [EventEncoder(i, head, "text", options.include_usage) for i in range(len(self._choices))]

        def end() -> bytes:
            usage = usage_of(cast(list[RequestOutput], self._last), self._n) if options.include_usage else None
            return DONE if usage is None else usage_event(head, usage) + DONE

        if len(encoders) == 1:
            return events_of(self._service, self._choices[0], self._encode(0, encoders[0], options, end), writer)
        return merged([events_of(self._service, self._choices[i], self._encode(i, encoder, options))
                       for i, encoder in enumerate(encoders)], end)

    def _encode(self, index: int, encoder: EventEncoder, options: StreamOptions,
                end: Callable[[], bytes] | None = None) -> Encode:
        """What makes the events of one choice; `end` gives what follows the last of them."""
        echo = self._echo[index // self._n]

        def encode(output: RequestOutput) -> bytes:
            nonlocal echo
            if options.continuous_usage_stats:
                encoder.set_usage(usage_of([output], 1))
            completion = output.outputs[0]
            event = encoder.text(completion.text) if completion.text else b""
            if echo:
                event, echo = encoder.text(echo) + event, ""
            if output.finished:
                event += encoder.end(b'""', completion.finish_reason or "", completion.stop_reason)
                self._last[index] = output
                if end is not None:
                    event += end()
            return event

        return encode
