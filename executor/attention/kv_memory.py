"""The memory of a rank's KV blocks, as bytes. A backend sees what it likes in a block."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import groupby

import msgspec
import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.model.kv.kv_layout import KvLayout
from sidestep.ipc.transport.step import Int32
from sidestep.kernels.native.large_pages import pages_of_their_own
from sidestep.kernels.ops.block_copy import copy_blocks


class KvMemory:
    """The blocks of all layers.

    Neighbouring memories of a block that have one size are one allocation: uint8 [memories, blocks,
    bytes]. So a model whose layers are all alike has one.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, *, cleared: bool
    ) -> None:
        """Allocate the blocks. cleared: whether all bytes are 0 at first, rather than anything.

        Raises torch.OutOfMemoryError, RuntimeError, MemoryError or OSError when there is no room.
        """
        self.layout, self.num_blocks, self.device = layout, num_blocks, device
        self.parts = [
            _memory((len(list(alike)), num_blocks, size), device, cleared=cleared)
            for size, alike in groupby(layout.memories)
        ]
        """The allocations, in the order of their memories."""
        self.mixes_codes = len(set(layout.layers)) > 1 and any(
            layer.format != "model" for layer in layout.layers
        )
        """Whether a layer may find codes of another layer's form in a block that is used again."""
        self._memories = [memory for part in self.parts for memory in part]

    @property
    def nbytes(self) -> int:
        """The size of all blocks."""
        return sum(part.nbytes for part in self.parts)

    def of_layer(self, layer: int) -> Tensor:
        """Return the bytes of a layer's blocks, uint8 [blocks, bytes].

        layer: index among the layers with attention.
        """
        place, block_size = self.layout.places[layer], self.layout.block_size
        own = block_size * self.layout.layers[layer].token_bytes(self.layout.itemsize)
        return self._memories[place.memory][:, :own]

    def of_layers(self, layers: Sequence[int]) -> KvMemory:
        """Return the same memory as some of the layers see it, which are counted anew."""
        own = self.layout
        part = copy(self)
        part.layout = msgspec.structs.replace(
            own,
            layers=tuple(own.layers[layer] for layer in layers),
            places=tuple(own.places[layer] for layer in layers),
        )
        return part

    def copy_blocks(self, sources: Int32, targets: Int32) -> None:
        """Copy blocks in all layers, in one launch for each allocation."""
        # Padded to whole 16 bytes, as the kernel was compiled for; a negative source is skipped.
        columns = np.full((2, -(-len(sources) // 4) * 4), -1, np.int32)
        columns[:, : len(sources)] = sources, targets
        on_device = to_device(columns, self.device)
        for part in self.parts:
            words = part.view(torch.int32) if part.shape[2] % 4 == 0 else part
            copy_blocks(words, *on_device)


def _memory(shape: Sequence[int], device: torch.device, *, cleared: bool) -> Tensor:
    """Return memory of this many bytes."""
    if device.type == "cpu":  # the system clears what it gives
        return pages_of_their_own(shape)
    empty = torch.zeros if cleared else torch.empty
    return empty(shape, dtype=torch.uint8, device=device)
