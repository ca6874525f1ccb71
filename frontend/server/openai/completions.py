"""Route /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.input.no_tokenizer import refuse
from sidestep.frontend.output.outputs import CompletionOutput, RequestOutput
from sidestep.frontend.server.openai.answer import Answer, Encode, Ending
from sidestep.frontend.server.openai.answer_logprobs import (
    CompletionLogprobWriter,
    joined,
    prompt_logprobs,
)
from sidestep.frontend.server.openai.encoding import EventEncoder, IdsOfChoice
from sidestep.frontend.server.schemas.fields import (
    MAX_N,
    Natural,
    NumLogprobs,
    SamplingFields,
    refuse_not_yet,
    sampling_params,
)
from sidestep.frontend.server.schemas.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishWord,
    Usage,
)
from sidestep.frontend.server.schemas.structure import form_of
from sidestep.frontend.server.service.prompt_ids import Prompts, split_prompts, token_ids_of
from sidestep.frontend.server.service.service import Service, new_id
from sidestep.frontend.server.transport.errors import refused
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.sampling_params import RequestOutputKind

MAX_CHOICES = 1024
"""Largest number of choices of one request: its prompts times n or best_of."""
_DEFAULT_TOKENS = 16


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /v1/completions."""

    prompt: Prompts
    """Prompt as text or token ids, or a list of either."""
    max_tokens: Natural | None = None
    """0 is allowed only with echo, for the prompt's logprobs."""
    echo: bool | None = None
    """Repeat the prompt before the completion."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds the model's special tokens to a text; true if not given."""
    logprobs: NumLogprobs | None = None
    """Return the logprobs of each token and of this many most probable ones; with echo, of the
    prompt's tokens too."""
    best_of: Annotated[int, msgspec.Meta(ge=1, le=MAX_N)] | None = None
    """Number of completions of each prompt, of which the `n` most probable are returned; not in
    streams."""
    # Beam search, as in vLLM. It goes neither with streams nor with fields that change how tokens
    # are sampled.
    use_beam_search: bool | None = None
    """Return the `n` best continuations that a search over as many beams finds."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # Not implemented: see fields.NOT_YET.
    suffix: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionRoute:
    """Route that completes prompts."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer a request, as one body or as a stream. Raises ApiError and ValidationError."""
        service, size = self._service, len(body)
        request = await service.large.decode(body, _decoder)
        model = service.check_model(request.model)
        refuse_not_yet(request)
        prompts = await self._read(request, size)
        if request.echo and not service.llm.get_tokenizer().has_texts:
            refuse("echo", "repeats the prompt's text")
        if request.stream and (request.best_of or 0) > (request.n or 1):
            raise refused(
                "best_of", "cannot be streamed: which completions are best is known at the end"
            )
        form = form_of(request.response_format, request.structured_outputs)
        only_echo = request.max_tokens == 0
        if only_echo and (not request.echo or request.use_beam_search):
            raise refused("max_tokens", "0 has a meaning only with echo, and without a search")
        defaults = service.llm.sampling_defaults
        limit = request.max_tokens
        if limit is None:
            limit = int(defaults.get("max_tokens", _DEFAULT_TOKENS))
        # The engine cannot compute the prompt alone, so one token is generated and dropped.
        limit = max(limit, 1)
        search = beam_search_params(request, limit)
        if form is not None and search is not None:
            raise refused("use_beam_search", "cannot go with a form that the output must have")
        params = sampling_params(
            request,
            limit,
            defaults,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            logprobs=request.logprobs,
            n=request.n or 1,
            best_of=request.best_of,
            structured_outputs=None if form is None else form.params,
        )
        if form is not None:
            await form.check(service.llm)
        if request.echo and request.logprobs is not None:
            most = max(request.logprobs, request.prompt_logprobs or 0)
            params = msgspec.structs.replace(params, prompt_logprobs=most)
        name, n = new_id("cmpl"), request.n or 1
        choices = service.choices(http, name, prompts, params, request, n=n, beam_search=search)
        echo = (
            await service.large.run(size, self._texts, prompts)
            if request.echo
            else [""] * len(prompts)
        )
        answer = CompletionAnswer(
            service=service,
            name=name,
            model=model,
            choices=choices,
            n=n,
            with_ids=bool(request.return_token_ids),
            echo=echo,
            shows_prompt_logprobs=request.prompt_logprobs is not None,
            shows_output=not only_echo,
        )
        return await answer.respond(http, request)

    async def _read(self, request: CompletionRequest, size: int) -> list[list[int]]:
        """Return the token ids of each prompt. Raises ApiError."""
        service = self._service
        prompts = await service.large.run(size, split_prompts, "prompt", request.prompt)
        num = request.best_of or request.n or 1
        if len(prompts) * num > MAX_CHOICES:
            raise refused(
                "prompt",
                f"{len(prompts)} prompts with {num} completions each are more than {MAX_CHOICES}",
            )
        special = request.add_special_tokens is not False
        return await token_ids_of(service, "prompt", prompts, size, add_special_tokens=special)

    def _texts(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        tokenizer = self._service.llm.get_tokenizer()
        return [tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (),
    "logprobs": (),
    "prompt_logprobs": (),
    "stream": (False,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "temperature_last": (False,),
    "min_tokens": (0,),
    "seed": (),
    "stop": (),
    "stop_token_ids": ([],),
    "skip_special_tokens": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "repetition_detection": (),
}
"""Field that has no effect on a beam search -> its neutral values."""


def beam_search_params(request: CompletionRequest, max_tokens: int) -> BeamSearchParams | None:
    """Return the parameters of the beam search; None if the request asks for none.

    Raises ApiError and ValidationError.
    """
    if not request.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(request, name) is not None:
                raise refused(name, "has a meaning only with use_beam_search: true")
        return None
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(request, name)) is not None and value not in neutral:
            raise refused(name, "has no meaning with use_beam_search: true")
    return BeamSearchParams(
        beam_width=request.n or 1,
        max_tokens=max_tokens,
        ignore_eos=request.ignore_eos is True,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
        include_stop_str_in_output=request.include_stop_str_in_output is True,
    )


@dataclass(kw_only=True, eq=False)
class CompletionAnswer(Answer):
    """Answer to one request for completions."""

    event_object = "text_completion"
    content_key = "text"
    echo: Sequence[str]
    """For each prompt, the text that its completions begin with."""
    shows_prompt_logprobs: bool
    """Whether the request asks for prompt_logprobs itself; logprobs with echo do not count."""
    shows_output: bool
    """Whether the answer has generated text; False: it is the echo alone."""

    def _body(self, outputs: Sequence[RequestOutput], usage: Usage) -> Completion:
        return Completion(
            id=self.name,
            created=self.created,
            model=self.model,
            choices=[self._choice(i, output) for i, output in enumerate(outputs)],
            usage=usage,
        )

    def _choice(self, index: int, output: RequestOutput) -> CompletionChoice:
        completion, logprobs = output.outputs[0], self._writer(index)
        choice = CompletionChoice(
            index=index,
            text=self.echo[index // self.n] + completion.text,
            logprobs=None if logprobs is None else logprobs.write(output),
            finish_reason=cast(FinishWord, completion.finish_reason),
            stop_reason=completion.stop_reason,
        )
        if self.shows_prompt_logprobs and output.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
        if self.with_ids:
            choice.prompt_token_ids, choice.token_ids = (
                list(output.prompt_token_ids),
                list(completion.token_ids),
            )
        return choice

    def _trimmed(self, output: RequestOutput) -> RequestOutput:
        """Return an output without the generated token if the request asks for none."""
        if self.shows_output:
            return output
        completion = replace(output.outputs[0], text="", token_ids=[], logprobs=None)
        if completion.finish_reason == "stop":  # the dropped token has ended the text
            completion = replace(completion, finish_reason="length", stop_reason=None)
        return replace(output, outputs=[completion], metrics=output.metrics.without_tokens())

    def _writer(self, index: int) -> CompletionLogprobWriter | None:
        params = self.choices[index].params
        if params.logprobs is None:
            return None
        return CompletionLogprobWriter(
            self.service.llm.get_tokenizer(), params, bool(self.echo[index // self.n])
        )

    def _makers(self, index: int, encoder: EventEncoder, ids: IdsOfChoice) -> tuple[Encode, Ending]:
        echo, logprobs = self.echo[index // self.n], self._writer(index)
        untold: CompletionLogprobs | None = None
        has_begun = False

        def make_new(output: RequestOutput) -> bytes:
            nonlocal echo, untold, has_begun
            before, has_begun = b"" if has_begun else ids.of_prompt(output.prompt_token_ids), True
            events, text = b"", output.outputs[0].text
            if logprobs is not None:
                # The first output has the prompt's logprobs, so the prompt's text goes into the
                # same event.
                text, echo = echo + text, ""
                untold = joined(untold, logprobs.write(output))
            elif echo:
                events, echo, before = encoder.text(echo, None, before), "", b""
            if text or before:
                events += encoder.text(text, untold, before + ids.take())
                untold = None
            return events

        def ending(completion: CompletionOutput) -> tuple[str, CompletionLogprobs | None]:
            return completion.finish_reason or "", untold

        return make_new, ending
