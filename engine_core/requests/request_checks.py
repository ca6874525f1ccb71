"""The check of a request before the scheduler takes it: no value in it can make a step fail.

A frontend has checked what its users gave it, and says it to them in their words. This check is for
frontends that are wrong themselves: what it lets through fits in the columns of a step, and names
no token that the model does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.params.logits_controls import MAX_BAD_WORD_TOKENS, Controls, decode_controls
from sidestep.ipc.params.ranges import (
    BIAS,
    MAX_LOGPROBS,
    PENALTY,
    REPETITION_PENALTY,
    check,
    is_in,
    is_number,
)
from sidestep.ipc.transport.messages import AddRequest, CallWorkers, unpack_ids
from sidestep.ipc.transport.worker_calls import Sleep

_INT32 = range(-(2**31), 2**31)


class RequestChecks:
    """The checks of messages to an engine with one model."""

    def __init__(self, spec: ModelSpec, processors: Iterable[str] = ()) -> None:
        """Check for this model. processors: names of the engine's logits processors."""
        self._vocab_size = spec.vocab_size
        self._pools = spec.pooling is not None
        self._processors = frozenset(processors)

    def check_request(self, message: AddRequest) -> None:
        """Raise ValidationError, which names the field, for a request that no step can run."""
        self._check_column("prompt_token_ids", message.prompt_token_ids)
        self._check_column("output_token_ids", message.output_token_ids)
        for name in ("arrival", "deadline"):
            time = getattr(message, name)
            check(time is None or math.isfinite(time), name, f"is not a time: {time!r}")
        check(message.priority in _INT32, "priority", f"{message.priority} has more than 32 bits")
        check(message.num_public_tokens >= 0, "num_public_tokens", "must not be negative")
        sampling = message.sampling
        for name in ("top_k", "min_tokens"):
            value = getattr(sampling, name)
            check(value in _INT32, name, f"{value} has more than 32 bits")
        self._check_ids("stop_token_ids", sampling.stop_token_ids or ())
        self._check_forms(message)
        try:
            controls = decode_controls(message.controls)
        except Exception as error:
            raise ValidationError("controls", f"cannot be read: {error}") from None
        self._check_controls(controls)
        check(
            controls.has_grammar == (message.grammar is not None) and not controls.is_beam,
            "controls",
            "are not those of such a request",
        )

    def check_call(self, message: CallWorkers) -> None:
        """Raise ValidationError for a call that would harm the core or its workers."""
        check(
            math.isfinite(message.wait_s) and message.wait_s >= 0,
            "wait_s",
            f"must be a number of seconds, not {message.wait_s!r}",
        )
        folder = getattr(message.call, "folder", "")
        check("\0" not in folder, "folder", "is not a path")
        if isinstance(message.call, Sleep):
            check(message.call.level in (1, 2), "level", f"must be 1 or 2: {message.call.level}")

    def _check_forms(self, message: AddRequest) -> None:
        """Check that what is asked for goes together, and that the model can do it."""
        beams, n = message.beam_search, message.sampling.n
        check(
            (message.pooling is not None) == self._pools,
            "pooling",
            "this model makes vectors" if self._pools else "this model makes text",
        )
        check(
            message.pooling is None or (n == 1 and beams is None and message.grammar is None),
            "pooling",
            "gives one vector, and no text",
        )
        if beams is not None:
            check(message.grammar is None, "grammar", "does not go with a beam search")
            check(
                2 * beams.beam_width <= self._vocab_size,
                "beam_width",
                f"{beams.beam_width} is more than half of the model's {self._vocab_size} tokens",
            )
        check(
            not message.output_token_ids or (n == 1 and beams is None and message.pooling is None),
            "output_token_ids",
            "belong to one choice",
        )

    def _check_controls(self, controls: Controls) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(controls, name)
            check(-1 <= value <= MAX_LOGPROBS, name, f"must be at most {MAX_LOGPROBS}, not {value}")
        for name, limits in (
            ("presence_penalty", PENALTY),
            ("frequency_penalty", PENALTY),
            ("repetition_penalty", REPETITION_PENALTY),
        ):
            value = getattr(controls, name)
            check(is_number(value) and is_in(value, limits), name, f"{value!r} is out of range")
        self._check_ids("allowed_token_ids", controls.allowed_token_ids)
        self._check_ids("logit_bias", controls.logit_bias)
        for value in controls.logit_bias.values():
            check(is_number(value) and is_in(value, BIAS), "logit_bias", f"{value!r} is wrong")
        for word in controls.bad_words:
            fits = 0 < len(word) <= MAX_BAD_WORD_TOKENS
            check(fits, "bad_words", f"holds a word of {len(word)} tokens")
            self._check_ids("bad_words", word)
        for name in controls.extra_args:
            check(name in self._processors, "extra_args", f"{name!r} is no logits processor here")

    def _check_column(self, name: str, column: bytes) -> None:
        check(len(column) % 4 == 0, name, f"{len(column)} bytes are no column of 32-bit numbers")
        ids = unpack_ids(column)
        if len(ids):
            self._check_range(name, int(np.min(ids)), int(np.max(ids)))

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        given = list(ids)
        if given:
            self._check_range(name, min(given), max(given))

    def _check_range(self, name: str, low: int, high: int) -> None:
        wrong = low if low < 0 else high
        check(
            low >= 0 and high < self._vocab_size,
            name,
            f"{wrong} is not a token id: the model has {self._vocab_size}",
        )
