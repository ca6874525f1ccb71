"""Queries that a factor of their positions multiplies, before any backend attends with them.

Llama 4 and Ministral 3 sharpen attention so, far behind the lengths of their training.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, Norms, StepBatch
from sidestep.kernels.unfinished_product import Product, finished


def open_scaled(backend: type[AttentionBackend], setup: AttentionSetup) -> AttentionBackend:
    """Return a backend with an empty cache, with queries that are scaled where a model does so."""
    if all(table.query_factors is None for table in setup.rotary):
        return backend(setup)
    return ScaledQueries(backend(replace(setup, split_weights=None)), setup)


class ScaledQueries(AttentionBackend):
    """A backend that scales queries and leaves the rest to another.

    The rotary embedding is linear, so it may come after the factor. Norms of heads may not.
    """

    def __init__(self, inner: AttentionBackend, setup: AttentionSetup) -> None:
        """Attend with `inner`, which was made with the same setup."""
        self.cache = inner.cache
        self._inner, self._shape = inner, setup.shape
        self._tables = [table.query_factors for table in setup.rotary]
        self._factors: list[Tensor | None] = []
        """[T, 1] of each table, in this step."""

    def begin_step(self, batch: StepBatch) -> None:
        """Look the factors of the step's tokens up."""
        self._factors = [
            None if table is None else table.index_select(0, batch.positions)
            for table in self._tables
        ]
        self._inner.begin_step(batch)

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Scale the queries, and attend."""
        qkv = finished(qkv)
        factors = self._factors[self._shape.table(layer)]
        if factors is not None:
            assert norms is None, "a norm would undo the factor"
            qkv[:, : self._shape.num_heads * self._shape.head_dim].mul_(factors)
        return self._inner.attend(layer, qkv, norms, sinks, kv_scales)
