"""From a call's arguments to a request that is known to be right. What is wrong raises here, with the field's name, and
nothing has been sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from sidestep.frontend.chat_template import Message
from sidestep.frontend.controls import ControlsMaker, check_text
from sidestep.frontend.structured_outputs import GrammarMaker
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.beam_search_params import BeamSearchParams
from sidestep.ipc.controls import encode_controls
from sidestep.ipc.errors import ValidationError
from sidestep.ipc.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams
from sidestep.ipc.structured_outputs import Grammar, StructuredOutputsParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict with `prompt` or `prompt_token_ids`."""

_LONG_TEXT = 2048
"""Characters from which tokenising (about 0.3 us each) would be felt by the other streams of the event loop."""
_MAX_PRIORITY = 2**31 - 1
_LOWEST_TEMPERATURE = 0.01
"""Logits divided by less would leave the range of their type."""


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
    """See ipc.controls."""
    grammar: Grammar | None = None
    best_of: BestOf | None = None
    """If only some of its choices are returned."""


@dataclass(frozen=True, slots=True)
class BestOf:
    """What is returned of a request that makes more choices than it returns."""

    num: int
    with_logprobs: bool
    """Whether the logprobs that they are ranked by are asked for."""


class InputProcessor:
    """Checks and tokenises."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int,
                 processors: Sequence[str] = ()) -> None:
        """processors: names of the engine's logits processors."""
        self._tokenizer = tokenizer
        self._controls = ControlsMaker(tokenizer, vocab_size, processors)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._grammars = GrammarMaker(tokenizer)
        self._random = random.SystemRandom()

    async def process(self, prompt: Prompt, sampling_params: SamplingParams | None, *, priority: int = 0,
                      cache_salt: str | None = None, num_public_tokens: int = 0,
                      deadline_s: float | None = None) -> ProcessedRequest:
        """Raises ValidationError. Long texts are tokenised in a thread, so that the event loop goes on."""
        arrival = time.monotonic()
        sampling = sampling_params if sampling_params is not None else SamplingParams()
        self._check_sampling(sampling)
        sampling, best_of = _all_choices(sampling)
        controls = encode_controls(self._controls.make(sampling))
        _check_options(priority, cache_salt, num_public_tokens, deadline_s)
        text, special, ids = self._read(prompt)
        if text is not None:
            ids = await self.tokenize(text, special)
        self._check_ids(ids)
        if num_public_tokens > len(ids):
            raise ValidationError("num_public_tokens", f"{num_public_tokens} are more than the prompt's {len(ids)}")
        grammar = None if sampling.structured_outputs is None else await self.make_grammar(sampling.structured_outputs)
        return ProcessedRequest(
            prompt=text, prompt_token_ids=ids, sampling=self._complete(sampling, len(ids)), arrival=arrival,
            priority=priority, cache_salt=cache_salt, num_public_tokens=num_public_tokens,
            deadline=None if deadline_s is None else arrival + deadline_s,
            controls=controls, best_of=best_of, grammar=grammar)

    def for_beam_search(self, params: object) -> SamplingParams:
        """What a beam search has in common with other requests. Raises ValidationError."""
        if not isinstance(params, BeamSearchParams):
            raise ValidationError("params", f"must be BeamSearchParams, not {type(params).__name__}")
        if 2 * params.beam_width > self._vocab_size:
            raise ValidationError("beam_width", f"{params.beam_width} is more than half of the model's "
                                  f"{self._vocab_size} tokens")
        return SamplingParams(temperature=0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos,
                              detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)

    async def make_grammar(self, structure: StructuredOutputsParams) -> Grammar:
        """The grammar of a form that an output must have. Raises ValidationError."""
        return await self._grammars.make(structure)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; of a long one in a thread. Raises ValidationError."""
        if len(text) > _LONG_TEXT:
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens)

    def _read(self, prompt: object) -> tuple[str | None, bool, list[int]]:
        """The prompt as (text, whether to add special tokens, ids); one of text and ids is empty."""
        if isinstance(prompt, str):
            return prompt, True, []
        if isinstance(prompt, Mapping):
            return self._read_dict(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            # The template writes the special tokens itself.
            return self._tokenizer.render_chat(cast(Sequence[Message], prompt)), False, []
        return None, False, self._read_ids("prompt", prompt)

    def _read_dict(self, prompt: Mapping[str, Any]) -> tuple[str | None, bool, list[int]]:
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValidationError("prompt", "a dict must have either 'prompt' or 'prompt_token_ids', not "
                                  f"{', '.join(map(repr, sorted(map(str, prompt)))) or 'nothing'}")
        if "prompt_token_ids" in prompt:
            return None, False, self._read_ids("prompt_token_ids", prompt["prompt_token_ids"])
        if not isinstance(prompt["prompt"], str):
            raise ValidationError("prompt", f"must be text, not {type(prompt['prompt']).__name__}")
        return prompt["prompt"], True, []

    def _read_ids(self, field: str, ids: object) -> list[int]:
        # bytes are a sequence of numbers too, but nobody means token ids by them.
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
            allowed = "text, a list of token ids, or a list of chat messages" if field == "prompt" else "a list"
            raise ValidationError(field, f"must be {allowed}, not {type(ids).__name__}")
        self._check_length(len(ids))  # before looking at each
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValidationError(field, f"holds {token!r}, which is not a token id")
        return list(ids)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens + 1 > self._max_model_len:
            raise ValidationError("prompt", f"has {num_tokens} tokens; with one of output that is more than "
                                  f"max_model_len ({self._max_model_len})")

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ValidationError("prompt", "is empty")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise ValidationError("prompt_token_ids", f"{wrong} is not a token id: the model has {self._vocab_size}")
        self._check_length(len(ids))

    def _check_sampling(self, sampling: object) -> None:
        if not isinstance(sampling, SamplingParams):
            raise ValidationError("sampling_params", f"must be SamplingParams, not {type(sampling).__name__}")
        for token in sampling.stop_token_ids or ():
            if token >= self._vocab_size:
                raise ValidationError("stop_token_ids", f"{token} is not a token id: the model has {self._vocab_size}")
        for text in sampling.stop_strings:
            check_text("stop", text)

    def _complete(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Fills in what was left open, and brings what has no effect beyond a limit within it: the engine's columns
        hold 32-bit numbers."""
        room = self._max_model_len - num_prompt
        if sampling.min_tokens > room:
            raise ValidationError("min_tokens", f"{sampling.min_tokens} is more than the {room} tokens that fit after "
                                  f"the prompt (max_model_len is {self._max_model_len})")
        # These travel in the controls and the grammar.
        changes: dict[str, Any] = {
            name: None for name in ("logit_bias", "allowed_token_ids", "bad_words", "extra_args", "structured_outputs")
            if getattr(sampling, name) is not None}
        if sampling.max_tokens is None or sampling.max_tokens > room:
            changes["max_tokens"] = room
        if sampling.seed is None:
            changes["seed"] = self._random.randint(0, MAX_SEED) if sampling.temperature > 0 else 0
        if sampling.top_k > self._vocab_size:
            changes["top_k"] = 0
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            changes["temperature"] = _LOWEST_TEMPERATURE
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if type(value := getattr(sampling, name)) not in (float, int):  # numpy's, which messages cannot hold
                changes.setdefault(name, float(value))
        return msgspec.structs.replace(sampling, **changes) if changes else sampling


def _all_choices(sampling: SamplingParams) -> tuple[SamplingParams, BestOf | None]:
    """What the engine is asked for, and what is returned of it if that is less."""
    if not sampling.ranks_choices:
        return sampling, None
    best_of = BestOf(sampling.n, sampling.logprobs is not None)
    return msgspec.structs.replace(sampling, n=sampling.best_of, best_of=None, logprobs=sampling.logprobs or 0,
                                   output_kind=RequestOutputKind.FINAL_ONLY), best_of


def _check_options(priority: object, cache_salt: object, num_public_tokens: object, deadline_s: object) -> None:
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > _MAX_PRIORITY:
        raise ValidationError("priority", f"must be a whole number of 32 bits, not {priority!r}")
    if cache_salt is not None:
        if not isinstance(cache_salt, str) or not cache_salt:
            raise ValidationError("cache_salt", f"must be a non-empty string, not {cache_salt!r}")
        check_text("cache_salt", cache_salt)
    if not isinstance(num_public_tokens, int) or isinstance(num_public_tokens, bool) or num_public_tokens < 0:
        raise ValidationError("num_public_tokens", f"must be a whole number of tokens, not {num_public_tokens!r}")
    if deadline_s is not None:
        number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
        if not number or not cast(float, deadline_s) > 0:
            raise ValidationError("deadline_s", f"must be a positive number of seconds, not {deadline_s!r}")
