"""The processor that checks the arguments of a call and makes a request of them.

A wrong argument raises here, with the field's name, before anything has been sent.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec

from sidestep.frontend.input.lane import Lane
from sidestep.frontend.input.logits_controls import ControlsMaker, check_text
from sidestep.frontend.input.no_tokenizer import refuse
from sidestep.frontend.input.output_form import GrammarMaker
from sidestep.frontend.input.prompt_limit import PromptLimit
from sidestep.frontend.input.prompts import Prompt, read_prompt
from sidestep.frontend.input.tokenizer import LONG_TEXT, Tokenizer
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import encode_controls
from sidestep.ipc.params.ranges import MAX_SEED
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar, StructuredOutputsParams

_VERY_LONG_TEXT = 256 << 10
"""Characters from which texts are tokenised one at a time.

Tokenising such a text takes seconds of a core and much memory.
"""
_MANY_MESSAGES = 64
"""Messages of a conversation above which it is rendered in a thread."""
_MAX_PRIORITY = 2**31 - 1
_LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above 0.

Logits divided by less would leave the range of their type.
"""


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request as the engine takes it."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival: float
    priority: int
    cache_salt: str | None
    num_public_tokens: int
    deadline: float | None
    controls: bytes = b""
    """The encoded logits controls; see ipc.params.logits_controls."""
    grammar: Grammar | None = None
    best_of: BestOf | None = None
    """Which choices are returned; None if all are."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """The selection of choices for a request that makes more choices than it returns."""

    num: int
    with_logprobs: bool
    """Whether the user asked for the logprobs that rank the choices."""


class InputProcessor:
    """The processor that checks and tokenises the requests of one frontend."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        processors: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        seed: str | None = None,
        pools: bool = False,
    ) -> None:
        """Keep the options that requests are checked against.

        processors: names of the engine's logits processors. defaults: sampling parameters that the
        model's makers set. seed: text from which the seeds of requests without a seed are derived;
        None draws each seed at random. pools: whether requests get a vector, and no output.
        """
        self.default_sampling = SamplingParams(**(defaults or {}))
        """Sampling parameters of a request that brings none."""
        self._tokenizer = tokenizer
        self._controls = ControlsMaker(tokenizer, vocab_size, processors)
        self._vocab_size = vocab_size
        self.limit = PromptLimit(max_model_len, needs_output=not pools)
        """Most tokens of a prompt."""
        self._grammars = GrammarMaker(tokenizer)
        self._random = random.SystemRandom() if seed is None else random.Random(seed)
        self._lane = Lane()

    async def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        num_public_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> ProcessedRequest:
        """Return the request of a call's arguments.

        Raises ValidationError. Long texts are tokenised in a thread, so that the event loop
        continues.
        """
        arrival = time.monotonic()
        sampling = (
            self.default_sampling
            if sampling_params is None
            else as_sampling_params(sampling_params)
        )
        self._check_sampling(sampling)
        sampling = self._with_seed(
            sampling
        )  # before anything is awaited: seeds follow the order of calls
        sampling, best_of = _all_choices(sampling)
        controls = encode_controls(self._controls.make(sampling))
        read = (
            read_prompt(prompt, self._tokenizer, self.limit)
            if not _is_long_chat(prompt)
            else await asyncio.to_thread(read_prompt, prompt, self._tokenizer, self.limit)
        )
        cache_salt = cache_salt if cache_salt is not None else read.cache_salt
        _check_options(priority, cache_salt, num_public_tokens, deadline_s)
        if read.ids is not None:
            ids = read.ids
        else:
            ids = await self.tokenize(read.text or "", read.add_special_tokens, must_fit=True)
        self._check_ids(ids)
        if num_public_tokens > len(ids):
            raise ValidationError(
                "num_public_tokens", f"{num_public_tokens} are more than the prompt's {len(ids)}"
            )
        grammar = (
            None
            if sampling.structured_outputs is None
            else await self.make_grammar(sampling.structured_outputs)
        )
        return ProcessedRequest(
            prompt=read.text,
            prompt_token_ids=ids,
            sampling=self._complete(sampling, len(ids)),
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            num_public_tokens=num_public_tokens,
            deadline=None if deadline_s is None else arrival + deadline_s,
            controls=controls,
            best_of=best_of,
            grammar=grammar,
        )

    def for_beam_search(self, params: object) -> SamplingParams:
        """Return the sampling parameters that stand for a beam search.

        They hold what it has in common with other requests. Raises ValidationError.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValidationError(
                "params", f"must be BeamSearchParams, not {type(params).__name__}"
            )
        if 2 * params.beam_width > self._vocab_size:
            raise ValidationError(
                "beam_width",
                f"{params.beam_width} is more than half of the model's {self._vocab_size} tokens",
            )
        return SamplingParams(
            temperature=0,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def make_grammar(self, structure: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a form that an output must have; raises ValidationError."""
        if not self._tokenizer.has_texts:
            refuse("structured_outputs", "is about text")
        return await self._grammars.make(structure)

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, *, must_fit: bool = False
    ) -> list[int]:
        """Return the token ids of a text; a long text is tokenised in a thread.

        Refuse a text before it is tokenised if its length shows that it cannot fit. With
        `must_fit`, refuse it too if its tokens turn out to be too many. Raises ValidationError.
        """
        if not self._tokenizer.has_texts:
            refuse("prompt", "is text; give token ids")
        if (least := self._tokenizer.bound.least_tokens(text)) > self.limit.longest:
            raise self.limit.error(least, at_least=True)
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens,
            self.limit if must_fit else None,
        )
        if len(text) <= LONG_TEXT:
            return encode()
        if len(text) <= _VERY_LONG_TEXT:
            return await asyncio.to_thread(encode)
        return await self._lane.run(len(text), self._encode_very_long, text, encode)

    def _encode_very_long(self, text: str, encode: Callable[[], list[int]]) -> list[int]:
        """Return the token ids of a very long text, after a count of its bytes.

        Tokenising takes a second and 150 MB for each megabyte of text, so the count comes first.
        """
        try:
            least = self._tokenizer.bound.counted_least_tokens(text)
        except UnicodeEncodeError:
            least = 0  # not a valid text; `encode` raises for it
        if least > self.limit.longest:
            raise self.limit.error(least, at_least=True)
        return encode()

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ValidationError("prompt", "is empty")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise ValidationError(
                "prompt_token_ids", f"{wrong} is not a token id: the model has {self._vocab_size}"
            )
        self.limit.check(len(ids))

    def _with_seed(self, sampling: SamplingParams) -> SamplingParams:
        if sampling.seed is not None:
            return sampling
        return msgspec.structs.replace(
            sampling, seed=self._random.randint(0, MAX_SEED) if sampling.temperature > 0 else 0
        )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for token in sampling.stop_token_ids or ():
            if token >= self._vocab_size:
                raise ValidationError(
                    "stop_token_ids", f"{token} is not a token id: the model has {self._vocab_size}"
                )
        for text in sampling.stop_strings:
            check_text("stop", text)
        self._tokenizer.check_sampling(sampling)

    def _complete(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Return the parameters without open values and within the model's limits.

        A value that has no effect beyond a limit is lowered to the limit, because the engine's
        columns hold 32-bit numbers.
        """
        if not self.limit.needs_output:
            return sampling
        room = self.limit.max_model_len - num_prompt
        if sampling.min_tokens > room:
            raise ValidationError(
                "min_tokens",
                f"{sampling.min_tokens} is more than the {room} tokens that fit after "
                f"the prompt (max_model_len is {self.limit.max_model_len})",
            )
        # The controls and the grammar carry the values of these fields.
        changes: dict[str, Any] = {
            name: None
            for name in (
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
                "extra_args",
                "structured_outputs",
            )
            if getattr(sampling, name) is not None
        }
        if sampling.max_tokens is None or sampling.max_tokens > room:
            changes["max_tokens"] = room
        if sampling.detokenize and not self._tokenizer.has_texts:
            changes["detokenize"] = False
        if sampling.top_k > self._vocab_size:
            changes["top_k"] = 0
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            changes["temperature"] = _LOWEST_TEMPERATURE
        return msgspec.structs.replace(sampling, **changes) if changes else sampling


def as_sampling_params(given: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """Return the parameters; `given` may be a dict of fields. Raises ValidationError."""
    if isinstance(given, Mapping):
        return SamplingParams(**given)
    if not isinstance(given, SamplingParams):
        raise ValidationError(
            "sampling_params", f"must be SamplingParams, not {type(given).__name__}"
        )
    return given


def _is_long_chat(prompt: object) -> bool:
    """Return whether rendering a conversation takes long.

    A long rendering would delay the other streams of the event loop.
    """
    messages = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str)
        or not messages
        or not isinstance(messages[0], Mapping)
    ):
        return False
    return len(messages) > _MANY_MESSAGES or any(
        isinstance(message, Mapping) and _is_long(message.get("content")) for message in messages
    )


def _is_long(content: object) -> bool:
    return content is not None and (not isinstance(content, str) or len(content) > LONG_TEXT)


def _all_choices(sampling: SamplingParams) -> tuple[SamplingParams, BestOf | None]:
    """Return the parameters for the engine, and which choices are returned.

    The second is None if all choices are returned.
    """
    if not sampling.ranks_choices:
        return sampling, None
    best_of = BestOf(sampling.n, sampling.logprobs is not None)
    return msgspec.structs.replace(
        sampling,
        n=sampling.best_of,
        best_of=None,
        logprobs=sampling.logprobs or 0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    ), best_of


def _check_options(
    priority: object, cache_salt: object, num_public_tokens: object, deadline_s: object
) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > _MAX_PRIORITY:
        raise ValidationError("priority", f"must be a whole number of 32 bits, not {priority!r}")
    if cache_salt is not None:
        if not isinstance(cache_salt, str) or not cache_salt:
            raise ValidationError("cache_salt", f"must be a non-empty string, not {cache_salt!r}")
        check_text("cache_salt", cache_salt)
    if (
        not isinstance(num_public_tokens, int)
        or isinstance(num_public_tokens, bool)
        or num_public_tokens < 0
    ):
        raise ValidationError(
            "num_public_tokens", f"must be a whole number of tokens, not {num_public_tokens!r}"
        )
    if deadline_s is not None:
        number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
        if not number or not 0 < cast(float, deadline_s) < math.inf:
            raise ValidationError(
                "deadline_s", f"must be a positive number of seconds, not {deadline_s!r}"
            )
