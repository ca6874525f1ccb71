"""A load for `sidestep bench serve`: the requests, and the time of each.

The same seed gives the same load.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sidestep.ipc.common.errors import ValidationError


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a load."""

    prompt: str | list[int]
    output_len: int
    """Tokens that its output must have."""
    at: float
    """Earliest time at which it is sent, in seconds after the start."""


@dataclass(frozen=True)
class Lengths:
    """Whole numbers from `low` to `high`, all equally likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Lengths:
        """Return the lengths of a text such as '64' or '64:1024'.

        Raises ValidationError, which begins with `name`.
        """
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ValidationError(name, f"{text!r} is neither a number nor LOW:HIGH") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValidationError(name, f"{text!r} must be from 1 up, the lower number first")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Return one of the lengths, at random."""
        return rng.randint(self.low, self.high)


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of requests."""

    prompt: str | list[int]
    output_len: int


def random_requests(
    count: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int
) -> list[tuple[list[int], int]]:
    """Return prompts of random token ids, and the length of each one's output."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(vocab_size) for _ in range(inputs.draw(rng))], outputs.draw(rng))
        for _ in range(count)
    ]


def read_requests(path: str, count: int) -> list[tuple[str | list[int], int]]:
    """Return the first `count` lines of a file, as prompts and output lengths.

    Each line is a JSON object: {"prompt": text or token ids, "output_len": tokens}. Raises
    ValidationError with the number of a line that is something else; OSError.
    """
    found: list[tuple[str | list[int], int]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip() or len(found) == count:
            continue
        try:
            request = msgspec.convert(json.loads(line), _Line)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValidationError("dataset", f"{path}, line {number}: {error}") from None
        found.append((request.prompt, request.output_len))
    if not found:
        raise ValidationError("dataset", f"{path} has no requests")
    return found


def arrivals(rate: float, poisson: bool, seed: int) -> Iterator[float]:
    """Yield the seconds at which requests come, `rate` a second.

    The gaps are random (exponential) or all equal. All requests come at once if the rate is
    infinite.
    """
    rng, now = random.Random(seed), 0.0
    while True:
        yield now
        now += rng.expovariate(rate) if poisson else 1 / rate
