"""Parameters of beam search, checked where they are made: a wrong value fails at the call."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sidestep.ipc.common.errors import ValidationError

MAX_BEAM_WIDTH = 64
"""Most beams: each row brings back twice as many candidates in each step, or more."""


class BeamSearchParams(
    msgspec.Struct, kw_only=True, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """Beam search keeps the `beam_width` most probable continuations, token by token.

    Names and defaults are those that users of vLLM and transformers know; results are those of
    transformers. Raises ValidationError, which names the field, when a value is out of range, and
    TypeError for an unknown name.
    """

    beam_width: int
    """Continuations that are kept, and that come back.

    At most MAX_BEAM_WIDTH, and the engine's max_num_seqs.
    """
    max_tokens: int = 16
    """Most tokens of a continuation."""
    length_penalty: float = 1.0
    """Exponent of the length by which cumulative logprobs are divided to compare continuations.

    The score is cumulative logprob / length ** length_penalty: above 0 it favours long ones.
    """
    early_stopping: bool | Literal["never"] = False
    """When the search ends, once `beam_width` continuations have ended.

    True: at once. False: when no running one would be better if it ended now. 'never': when none
    can become better at any length.
    """
    ignore_eos: bool = False
    """Do not end a continuation at the end-of-sequence token."""
    temperature: float = 0.0
    """Must be 0: nothing is sampled."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token at the end of `tokens` and `text`."""

    def __post_init__(self) -> None:
        for field, least, most in (("beam_width", 1, MAX_BEAM_WIDTH), ("max_tokens", 1, 2**31 - 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValidationError(
                    field, f"must be a whole number between {least} and {most}, not {value!r}"
                )
        penalty = self.length_penalty
        if (
            not isinstance(penalty, int | float)
            or isinstance(penalty, bool)
            or not math.isfinite(penalty)
        ):
            raise ValidationError("length_penalty", f"must be a number, not {penalty!r}")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValidationError(
                "early_stopping", f"must be True, False or 'never', not {self.early_stopping!r}"
            )
        for field in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, field), bool):
                raise ValidationError(field, f"must be True or False, not {getattr(self, field)!r}")
        if isinstance(self.temperature, bool) or self.temperature != 0:
            raise ValidationError(
                "temperature", f"must be 0, not {self.temperature!r}: beam search samples nothing"
            )

    def num_candidates(self, num_eos: int) -> int:
        """Return how many continuations of each beam are looked at.

        They are enough that `beam_width` of all have not ended. num_eos: tokens that end a
        continuation.
        """
        return self.beam_width * max(2, 1 + num_eos)
