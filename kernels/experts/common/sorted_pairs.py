"""Pairs of a token and an expert that are sorted by their experts.

They lie in tiles of one expert. The number of tiles is known on the device alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.launch import cdiv


class SortedPairs(NamedTuple):
    """Pairs in tiles, each of one expert."""

    order: Tensor
    """int32: the pairs' numbers; those that fill a tile up are the number of pairs."""
    experts: Tensor
    """int32: the expert of each tile; the number of experts for tiles that are not needed."""
    used: Tensor
    """int32 [1]: the number of tiles that are needed."""
    progress: Tensor
    """int32, zeros: a counter, and then one for each tile that is needed."""


def room_for_pairs(ids: Tensor, num_experts: int, in_tile: int) -> SortedPairs:
    """Return uninitialised memory for the sorted pairs of ids [T, k], with `in_tile` in a tile."""
    pairs = ids.numel()
    tiles = cdiv(pairs, in_tile) + min(pairs, num_experts)
    return SortedPairs(
        *(
            torch.empty(size, dtype=torch.int32, device=ids.device)
            for size in (tiles * in_tile, tiles, 1, 1 + tiles)
        )
    )
