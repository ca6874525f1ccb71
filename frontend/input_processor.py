"""From a call's arguments to a request that is known to be right. What is wrong raises here, with the field's name, and
nothing has been sent."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.errors import ValidationError
from sidestep.ipc.sampling_params import MAX_SEED, SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or a dict with `prompt` or `prompt_token_ids`."""

_LONG_TEXT = 2048
"""Characters from which tokenising (about 0.3 us each) would be felt by the other streams of the event loop."""


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """A request as the engine takes it."""

    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival: float
    priority: int
    cache_salt: str | None
    deadline: float | None


class InputProcessor:
    """Checks and tokenises."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._random = random.SystemRandom()

    async def process(self, prompt: Prompt, sampling_params: SamplingParams | None, *, priority: int = 0,
                      cache_salt: str | None = None, deadline_s: float | None = None) -> ProcessedRequest:
        """Raises ValidationError. Long texts are tokenised in a thread, so that the event loop goes on."""
        arrival = time.monotonic()
        sampling = sampling_params if sampling_params is not None else SamplingParams()
        self._check_options(sampling, priority, cache_salt, deadline_s)
        text, special, ids = self._read(prompt)
        if text is not None:
            if len(text) > _LONG_TEXT:
                ids = await asyncio.to_thread(self._tokenizer.encode, text, special)
            else:
                ids = self._tokenizer.encode(text, special)
        self._check_ids(ids)
        return ProcessedRequest(
            prompt=text, prompt_token_ids=ids, sampling=self._complete(sampling, len(ids)), arrival=arrival,
            priority=priority, cache_salt=cache_salt, deadline=None if deadline_s is None else arrival + deadline_s)

    def _read(self, prompt: Prompt) -> tuple[str | None, bool, list[int]]:
        """The prompt as (text, whether to add special tokens, ids); one of text and ids is empty."""
        if isinstance(prompt, str):
            return prompt, True, []
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids"}
            if unknown or len(prompt) != 1:
                raise ValidationError("prompt", "a dict must have either 'prompt' or 'prompt_token_ids', not "
                                      f"{', '.join(map(repr, sorted(map(str, prompt)))) or 'nothing'}")
            return self._read(prompt.get("prompt", prompt.get("prompt_token_ids")))
        if isinstance(prompt, Sequence) and prompt and all(isinstance(p, Mapping) for p in prompt):
            return str(self._tokenizer.apply_chat_template(prompt)), False, []  # type: ignore[arg-type]
        if isinstance(prompt, Sequence) and all(isinstance(p, int) and not isinstance(p, bool) for p in prompt):
            return None, False, list(prompt)  # type: ignore[arg-type]
        raise ValidationError("prompt", "must be text, a list of token ids, or a list of chat messages, not "
                              f"{type(prompt).__name__}")

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ValidationError("prompt", "is empty")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise ValidationError("prompt_token_ids", f"{wrong} is not a token id: the model has {self._vocab_size}")
        if len(ids) + 1 > self._max_model_len:
            raise ValidationError("prompt", f"has {len(ids)} tokens; with one of output that is more than "
                                  f"max_model_len ({self._max_model_len})")

    def _check_options(self, sampling: SamplingParams, priority: int, cache_salt: str | None,
                       deadline_s: float | None) -> None:
        if not isinstance(sampling, SamplingParams):
            raise ValidationError("sampling_params", f"must be SamplingParams, not {type(sampling).__name__}")
        for token in sampling.stop_token_ids or ():
            if token >= self._vocab_size:
                raise ValidationError("stop_token_ids", f"{token} is not a token id: the model has {self._vocab_size}")
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValidationError("priority", f"must be a whole number, not {priority!r}")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise ValidationError("cache_salt", f"must be a non-empty string, not {cache_salt!r}")
        if deadline_s is not None and (not isinstance(deadline_s, int | float) or not deadline_s > 0):
            raise ValidationError("deadline_s", f"must be a positive number of seconds, not {deadline_s!r}")

    def _complete(self, sampling: SamplingParams, num_prompt: int) -> SamplingParams:
        """Fills in what was left open: a seed for sampling, and as many tokens as fit."""
        room = self._max_model_len - num_prompt
        changes: dict[str, Any] = {}
        if sampling.seed is None:
            changes["seed"] = self._random.randint(0, MAX_SEED) if sampling.temperature > 0 else 0
        if sampling.max_tokens is None:
            changes["max_tokens"] = max(room, sampling.min_tokens)
        return msgspec.structs.replace(sampling, **changes) if changes else sampling
