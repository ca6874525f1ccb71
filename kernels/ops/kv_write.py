"""Writes of new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(cache: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Store token t's keys and values at slot_mapping[t] = block id * block size + offset.

    cache [num_blocks, block_size, 2 KVH, D], whose blocks may lie apart; kv [T, 2 KVH, D], the keys
    first; slot_mapping int64 [T], all different.
    """
    if cache.is_contiguous():
        cache.flatten(0, 1).index_copy_(0, slot_mapping, kv)
        return
    block_size = cache.shape[1]
    cache[slot_mapping // block_size, slot_mapping % block_size] = kv
