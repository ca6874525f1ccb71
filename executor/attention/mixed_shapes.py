"""Attention of layers whose heads differ in number or size, as in Gemma 4.

Backends compute heads of one shape. So layers of one shape have a backend of their own, and all
backends share the memory of the blocks, in which each layer has its own part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from sidestep.executor.attention.base import (
    AttentionBackend,
    AttentionSetup,
    AttentionShape,
    Heads,
    Norms,
    StepBatch,
)
from sidestep.executor.attention.kv_memory import KvMemory
from sidestep.executor.attention.scaled_queries import open_scaled
from sidestep.kernels.unfinished_product import Product


def open_attention(backend: type[AttentionBackend], setup: AttentionSetup) -> AttentionBackend:
    """Return a backend with an empty cache, for layers of one shape or of several."""
    if len(setup.shape.distinct_heads) == 1:
        return open_scaled(backend, setup)
    return MixedShapes(backend, setup)


class MixedShapes(AttentionBackend):
    """A backend that leaves each layer to the backend of its shape."""

    def __init__(self, backend: type[AttentionBackend], setup: AttentionSetup) -> None:
        """Open a `backend` for each shape of the layers."""
        shape = setup.shape
        # Cleared, as some backends want it.
        self.cache = KvMemory(setup.kv_layout, setup.num_blocks, setup.device, cleared=True)
        self._inner: list[AttentionBackend] = []
        self._of_layer: dict[int, tuple[AttentionBackend, int]] = {}
        """The backend of each layer, and the layer's index there."""
        for heads in shape.distinct_heads:
            layers = [layer for layer, own in enumerate(shape.heads) if own == heads]
            opened = open_scaled(backend, _setup_of(setup, heads, layers, self.cache))
            self._inner.append(opened)
            self._of_layer |= {layer: (opened, index) for index, layer in enumerate(layers)}

    def __repr__(self) -> str:
        return f"MixedShapes({self._inner})"

    def begin_step(self, batch: StepBatch) -> None:
        """Have each backend prepare the step."""
        for backend in self._inner:
            backend.begin_step(batch)

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Attend with the backend of the layer's shape."""
        backend, index = self._of_layer[layer]
        return backend.attend(index, qkv, norms, sinks, kv_scales)


def _setup_of(
    setup: AttentionSetup, heads: Heads, layers: Sequence[int], memory: KvMemory
) -> AttentionSetup:
    """Return the setup of some layers, which all have these heads and share the memory."""
    shape = setup.shape
    tables = [shape.table(layer) for layer in layers]
    own_tables = list(dict.fromkeys(tables))
    return dataclasses.replace(
        setup,
        shape=AttentionShape(
            num_layers=len(layers),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            windows=tuple(shape.windows[layer] for layer in layers),
            scales=tuple(shape.scale(layer) for layer in layers),
            softcaps=tuple(shape.softcap(layer) for layer in layers),
            has_sinks=shape.has_sinks,
            tables=tuple(own_tables.index(table) for table in tables),
            places=tuple(shape.place(layer) for layer in layers),
            kept=tuple(shape.kept[layer] for layer in layers),
            # A layer and the one whose keys it reads have heads of one shape.
            sources=tuple(layers.index(shape.source(layer)) for layer in layers),
        ),
        rotary=[setup.rotary[table] for table in own_tables],
        memory=memory.of_layers(layers),
        split_weights=None,
    )
