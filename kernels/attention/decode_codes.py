"""Launch of decode attention over codes of 8 bits (see decode_codes_gluon.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.common.scores_triton import LOG2_E
from sidestep.kernels.attention.decode_codes_gluon import _decode_codes
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.launch import has_pdl, next_power_of_2, pdl

_FORMATS, _DIMS, _MOST_HEADS = ("fp8", "int8"), (64, 128), 16
_ALIGNED = 64
"""The bytes of which a block's place is a multiple, so that copies of 16 are whole."""


def takes_codes(
    cache: CodedCache, dtype: torch.dtype, num_heads: int, tile: int, num_warps: int, stages: int
) -> bool:
    """Return whether kernels in Gluon take these codes and heads, one query a row, in such tiles.

    dtype: of the queries.
    """
    _, twice_kv_heads, page, dim = cache.shape
    return (
        has_pdl(cache.codes.device)
        and cache.format in _FORMATS
        and dtype in (torch.bfloat16, torch.float16)
        and dim in _DIMS
        and 2 * num_heads // twice_kv_heads <= _MOST_HEADS
        and page % tile == 0
        and tile % (16 * num_warps) == 0
        and 2 <= stages <= 8
        and cache.codes.stride(0) % _ALIGNED == 0
        and cache.codes.storage_offset() % _ALIGNED == 0
    )


def decode_codes(
    q: Tensor,
    cache: CodedCache,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    tile_ends: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor],
    config: DecodeConfig,
    *,
    num_heads: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Compute what `decode_attention` does with codes, for rows of one query.

    scratch: the parts, statistics and counters of a DecodeScratch of this configuration.
    """
    partial, stats, counters = scratch
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads = twice_kv_heads // 2
    group, slots_of = num_heads // kv_heads, partial.shape[0]
    padded, parts = next_power_of_2(group), slots_of // twice_kv_heads
    codes = cache.codes.view(torch.int32)
    # A thread combines this many numbers of parts at once.
    combined = 64 * 32 * config.num_warps // (padded * dim)
    _decode_codes[(parts * kv_heads,)](
        q,
        codes,
        cache.numbers,
        block_tables,
        slots,
        seq_lens,
        tile_ends,
        out,
        partial,
        stats,
        counters,
        sinks,
        q.stride(0),
        block_tables.stride(0),
        codes.stride(0),
        cache.numbers.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        parts,
        config.min_tiles,
        kv_heads,
        group,
        padded,
        8 if padded <= 8 else _MOST_HEADS,
        dim,
        page,
        config.tile,
        config.num_stages,
        window,
        softcap,
        tile_ends.shape[0],
        max(1, min(16, combined)),
        config.next_early,
        cache.format,
        num_warps=config.num_warps,
        **pdl(q),
    )
