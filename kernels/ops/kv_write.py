"""Writes of new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Store token t's keys and values at slot_mapping[t] = block id * block size + offset.

    cache [num_blocks * block_size, 2 KVH, D]; kv [T, 2 KVH, D], the keys first; slot_mapping int64
    [T], all different.
    """
    cache.index_copy_(0, slot_mapping, kv)
