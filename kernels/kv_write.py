"""Writing new keys and values into the paged cache."""

from __future__ import annotations

from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Stores token t's key and value at position slot_mapping[t] = block id * block size + offset.

    k_cache, v_cache [num_blocks * block_size, KVH, D]; k, v [T, KVH, D]; slot_mapping int64 [T], all different.
    """
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)
