"""Scores of pairs of texts, by an engine that pools.

A model with a head of one output reads both texts as one prompt. A model that makes embeddings
reads each text alone, and the score is the cosine of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.pooling_outputs import cosine
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.transport.step import Float32

T = TypeVar("T")


class Scores:
    """The scores of pairs of texts: the prompts that they need, and how they follow from these."""

    def __init__(self, spec: PoolingSpec, ones: Sequence[str], others: Sequence[str]) -> None:
        """Pair the texts: one with each of the others, or each with the other at its place.

        Raises ValidationError.
        """
        if spec.has_head and spec.width != 1:
            raise ValidationError(
                "runner", f"scores need a model with one output, and this one has {spec.width}"
            )
        if not ones or not others or len(ones) not in (1, len(others)):
            raise ValidationError(
                "text_1",
                f"must be one text, or as many as text_2 has; {len(ones)} texts and {len(others)} "
                "texts make no pairs",
            )
        self._is_pair = spec.has_head
        self._ones, self._others = list(ones), list(others)

    def __len__(self) -> int:
        return len(self._others)

    def __repr__(self) -> str:
        return f"Scores({len(self)} pairs)"

    def prompts(self, tokenizer: Tokenizer) -> list[str | list[int]]:
        """Return the prompts, in the order in which `of` takes their results."""
        if not self._is_pair:
            return [*self._ones, *self._others]
        return [tokenizer.encode_pair(*pair) for pair in self._pairs(self._ones, self._others)]

    def of(self, results: Sequence[Float32]) -> list[float]:
        """Return the score of each pair from the results of all prompts."""
        if self._is_pair:
            return [float(result[0]) for result in results]
        count = len(self._ones)
        return [cosine(*pair) for pair in self._pairs(results[:count], results[count:])]

    @staticmethod
    def _pairs(ones: Sequence[T], others: Sequence[T]) -> list[tuple[T, T]]:
        each = ones if len(ones) == len(others) else list(ones) * len(others)
        return list(zip(each, others, strict=True))
