"""Cache groups: the layers of a model whose keys and values are kept for the same tokens.

A group has a block table of its own. Layers with full attention are one group, which keeps the
blocks of all tokens. Layers with a window are other groups, which give back the blocks behind it.

All groups share one pool of blocks. A block holds the keys and values of its tokens in all layers
of one group, so groups have about the same number of layers: a block has memory for the largest of
them. So layers with one window may be several groups. The idea is that of vLLM's hybrid KV cache
manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sidestep.ipc.model.layer_spec import AttentionSpec, LayerSpec, attention_of

_TABLE_COST = 1 / 50
"""Share of a block's memory that may be unused for each block table that this saves."""


class CacheGroups(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of a model. The group of full attention has index 0, also if it has no layers."""

    has_full: bool = True
    """Whether any layer keeps the blocks of all tokens."""
    windows: tuple[int, ...] = ()
    """Window of each other group in tokens, the token itself included; from group 1 on."""

    @property
    def count(self) -> int:
        """The number of groups, which is that of block tables."""
        return 1 + len(self.windows)

    def most_in_window(self, window: int, block_size: int, max_ahead: int) -> int:
        """Return the most blocks that a request needs at once in a group with this window.

        max_ahead: most tokens from the first that it may still compute to the end of its next row.
        """
        return -(-(window - 1 + max_ahead) // block_size) + 1

    def blocks_of(self, num_tokens: int, block_size: int, max_ahead: int) -> int:
        """Return the blocks with which one request alone can have this many tokens."""
        blocks = -(-num_tokens // block_size)
        return blocks * self.has_full + sum(
            min(blocks, self.most_in_window(window, block_size, max_ahead))
            for window in self.windows
        )

    def most_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the most blocks that these tokens of requests have in all groups together."""
        return (self.has_full + len(self.windows)) * -(-num_tokens // block_size)


class LayerPlace(NamedTuple):
    """Where a layer's keys and values are."""

    group: int
    memory: int
    """Index of the layer's memory within a block."""


def cache_groups(layers: Sequence[LayerSpec], max_model_len: int) -> CacheGroups:
    """Return the groups of a model's layers.

    A window of `max_model_len` tokens or more is none.
    """
    mixers = [mixer for mixer in attention_of(layers) if not mixer.kv_back]
    layers_with = Counter(_window(mixer, max_model_len) for mixer in mixers)
    num_full = layers_with.pop(0, 0)
    windows = sorted(layers_with)

    def tables(size: int) -> list[int]:
        return [-(-layers_with[window] // size) for window in windows]

    def cost(size: int) -> float:
        count = (num_full > 0) + sum(tables(size))
        return count * size / len(mixers) + count * _TABLE_COST

    largest = max([num_full, *layers_with.values()])
    size = min(range(max(1, num_full), largest + 1), key=cost)
    return CacheGroups(
        has_full=num_full > 0,
        windows=tuple(
            window
            for window, count in zip(windows, tables(size), strict=True)
            for _ in range(count)
        ),
    )


def layer_places(
    layers: Sequence[LayerSpec], groups: CacheGroups, max_model_len: int
) -> tuple[LayerPlace, ...]:
    """Return the place of each layer with attention, of some layers such as those of a stage.

    groups: those of the whole model. Layers of one window take its groups in turn. A layer that
    reads the keys and values of another one has that layer's place.
    """
    seen, places = Counter[int](), list[LayerPlace]()
    for index, (mixer, source) in enumerate(
        zip(attention_of(layers), kv_sources(layers), strict=True)
    ):
        if source != index:
            places.append(places[source])
            continue
        window = _window(mixer, max_model_len)
        own = [i for i, one in enumerate(groups.windows, 1) if one == window] if window else [0]
        memory, turn = divmod(seen[window], len(own))
        seen[window] += 1
        places.append(LayerPlace(own[turn], memory))
    return tuple(places)


def kv_sources(layers: Sequence[LayerSpec]) -> tuple[int, ...]:
    """Return whose keys and values each layer with attention reads; most read their own.

    The indices are those among the layers with attention.
    """
    index_of: dict[int, int] = {}
    for layer, spec in enumerate(layers):
        if isinstance(spec.mixer, AttentionSpec):
            back = spec.mixer.kv_back
            index_of[layer] = index_of[layer - back] if back else len(index_of)
    return tuple(index_of.values())


def layers_in_block(places: Sequence[LayerPlace]) -> int:
    """Return the number of layers that a block has memory for; 0 for no layers."""
    return 1 + max((place.memory for place in places), default=-1)


def _window(mixer: AttentionSpec, max_model_len: int) -> int:
    """Return the window, or 0 if the layer keeps all tokens of every request."""
    return 0 if mixer.window >= max_model_len else mixer.window
