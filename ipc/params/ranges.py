"""The ranges of the sampling parameters, for Python and for the requests of the HTTP server."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sidestep.ipc.common.errors import ValidationError

MAX_SEED = 2**63 - 1
MAX_STOP_TOKEN_IDS = 128
"""Most stop tokens of one request.

With `min_tokens` they travel to the device in each step, in a message of bounded size.
"""
MAX_CHOICES = 1024
"""Most completions of one request."""
MAX_LOGPROBS = 20
"""Most log-probabilities of one token, as in OpenAI's API."""
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_PATTERN = 128
TEMPERATURE = msgspec.Meta(ge=0, le=2)
"""Range of `temperature`."""
TOP_P = msgspec.Meta(gt=0, le=1)
"""Range of `top_p`."""
TOP_K = msgspec.Meta(ge=-1)
"""Range of `top_k`."""
MIN_P = msgspec.Meta(ge=0, le=1)
"""Range of `min_p`."""
PENALTY = msgspec.Meta(ge=-2, le=2)
"""Range of `presence_penalty` and `frequency_penalty`."""
REPETITION_PENALTY = msgspec.Meta(ge=0.01, le=100)
"""Range of `repetition_penalty`."""
NUM_LOGPROBS = msgspec.Meta(ge=0, le=MAX_LOGPROBS)
"""Range of `logprobs` and `prompt_logprobs`."""
BIAS = msgspec.Meta(ge=-100, le=100)
"""Range of each number in `logit_bias`."""
PATTERN_SIZE = msgspec.Meta(ge=1)
"""Range of the pattern sizes in `repetition_detection`, in tokens; at most MAX_PATTERN."""
PATTERN_COUNT = msgspec.Meta(ge=2, le=2**31 - 1)
"""Range of `repetition_detection.min_count`."""


def check(condition: bool, field: str, problem: str) -> None:
    """Raise ValidationError with this problem of a field unless the condition holds."""
    if not condition:
        raise ValidationError(field, problem)


def is_int(value: object) -> bool:
    """Return whether a value is an integer and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_in(value: Any, limits: msgspec.Meta) -> bool:
    """Return whether a number is within the limits."""
    return (
        (limits.ge is None or value >= limits.ge)
        and (limits.gt is None or value > limits.gt)
        and (limits.le is None or value <= limits.le)
    )
