"""The memory of KV blocks: how large a block is, and which layers share its parts.

Planner, memory sizing and backends all count from here; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidestep.ipc.model.cache_groups import (
    LayerPlace,
    cache_groups,
    layer_places,
    layers_in_block,
)
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.ipc.model.layer_spec import LayerSpec, attention_of
from sidestep.ipc.model.model_spec import ModelSpec


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks of one rank.

    A block has one memory for each layer of its cache group. Layers of different groups that have
    the same index share a memory, which is as large as the largest of them needs.
    """

    layers: tuple[LayerKv, ...]
    """Keys and values of each layer with attention, in the order of the layers."""
    places: tuple[LayerPlace, ...]
    """Where they are."""
    itemsize: int
    """Bytes of a number of the model's type."""
    block_size: int
    """Tokens of a block."""

    @property
    def memories(self) -> tuple[int, ...]:
        """Bytes of a block in each of its memories."""
        sizes = [0] * layers_in_block(self.places)
        for layer, place in zip(self.layers, self.places, strict=True):
            own = self.block_size * layer.token_bytes(self.itemsize)
            sizes[place.memory] = max(sizes[place.memory], own)
        return tuple(sizes)

    @property
    def num_values(self) -> int:
        """The most keys and values of a token in a block."""
        values = [0] * layers_in_block(self.places)
        for layer, place in zip(self.layers, self.places, strict=True):
            values[place.memory] = max(values[place.memory], layer.num_values)
        return sum(values)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all memories; 0 for a stage without attention."""
        return sum(self.memories)


def kv_layout(
    spec: ModelSpec,
    num_ranks: int = 1,
    layers: Sequence[LayerSpec] | None = None,
    max_model_len: int | None = None,
    *,
    itemsize: int,
    block_size: int,
) -> KvLayout:
    """Return the KV blocks of one of the tensor-parallel ranks of a stage.

    layers: those of the stage; None for all. max_model_len: tokens of the longest request; None for
    the most that the model takes.
    """
    longest = spec.max_position_embeddings if max_model_len is None else max_model_len
    own = spec.layers if layers is None else layers
    return KvLayout(
        layers=tuple(mixer.kv(num_ranks) for mixer in attention_of(own)),
        places=layer_places(own, cache_groups(spec.layers, longest), longest),
        itemsize=itemsize,
        block_size=block_size,
    )
