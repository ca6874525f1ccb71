"""Attention of prompt chunks on a Hopper GPU.

The kernel is kernels/cuda/source/prefill_attention.cu. A block of it has a whole processor, and its
warps have tasks of their own, which Triton has no words for.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.attention.hopper.rows_of_cache import CacheForm, is_readable, rows_of
from sidestep.kernels.cuda.compiler import cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.cuda.tile_maps import box_map, tile_map
from sidestep.kernels.cuda.wgmma_source import kind_of, wgmma_source
from sidestep.kernels.launch import cdiv, num_processors
from sidestep.kernels.launch_order import check_early_reads

ROWS, KEYS = 128, 64
"""Rows of queries of a tile, and keys of a step."""
_DIMS = (64, 128)
_ROW_BYTES = 128
_THREADS = 384
_Q_STAGES, _MOST_KV_STAGES = 2, 8
_SHARED = 224 << 10
"""Bytes of a processor's shared memory for the rings."""


@dataclass(frozen=True)
class Form(CacheForm):
    """A form of the kernel, which is compiled for it."""

    @property
    def kv_stages(self) -> int:
        """Steps of keys and values that are loading at once."""
        row = self.dim * self.dtype.itemsize
        return min(_MOST_KV_STAGES, (_SHARED - _Q_STAGES * ROWS * row) // (2 * KEYS * row))

    @property
    def shared(self) -> int:
        """Bytes of the rings."""
        row = self.dim * self.dtype.itemsize
        return (_Q_STAGES * ROWS + self.kv_stages * 2 * KEYS) * row


class _Sizes(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in ("kv_heads", "page", "block_rows", "plan", "table_stride", "out_stride")
        ),
        ("scale", ctypes.c_float),
    )


class _Rows(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("tables", "slots", "lengths", "starts", "ends")
    )


@functools.cache
def _counter(device: torch.device) -> Tensor:
    """Return the counter of tiles that were taken, which is zero between launches.

    There is one for a device, since the launches follow one another.
    """
    return torch.zeros(1, dtype=torch.int32, device=device)


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    more = {"Q_STAGES": _Q_STAGES, "KV_STAGES": form.kv_stages}
    kind = kind_of(form.dtype)
    instructions = {
        "scores.cuh": wgmma_source(KEYS, kind, 16),
        "values.cuh": wgmma_source(form.dim, kind, 16, registers=True, by_input=True),
    }
    return cubin("prefill_attention", form.options | more, instructions)


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, "prefill_attention", threads=_THREADS, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def takes(cache: Tensor, dtype: torch.dtype, num_heads: int) -> bool:
    """Return whether the kernel takes queries of a type and number of heads, and such a cache."""
    return 2 * num_heads <= ROWS * cache.shape[1] and is_readable(cache, dtype, _DIMS)


def prefill_hopper(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    tile_ends: Tensor,
    out: Tensor,
    *,
    num_heads: int,
    max_tokens: int,
    max_rows: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """Compute what `prefill_attention` does, with tiles of ROWS rows.

    scale: of scores in units of ln 2.
    """
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads = twice_kv_heads // 2
    group = num_heads // kv_heads
    check_early_reads(
        "prefill_attention",
        block_tables=block_tables,
        slots=slots,
        seq_lens=seq_lens,
        query_starts=query_starts,
        tile_ends=tile_ends,
    )
    form = Form(q.dtype, dim, group, math.gcd(page, KEYS), window, sinks is not None)
    kernel = _KERNELS.to_launch(form, q)
    if kernel is None:
        return
    tokens = ROWS // group
    queries = q[:, : num_heads * dim].unflatten(1, (num_heads, dim))
    tiles = kv_heads * (cdiv(max_tokens, tokens) + max_rows)
    address = ctypes.c_void_p
    kernel.launch(
        min(tiles, num_processors(q.device)),
        [
            box_map(queries, (tokens, group), _ROW_BYTES),
            tile_map(rows_of(cache), form.box, _ROW_BYTES),
            _Rows(
                *(x.data_ptr() for x in (block_tables, slots, seq_lens, query_starts, tile_ends))
            ),
            address(None if sinks is None else sinks.data_ptr()),
            address(_counter(q.device).data_ptr()),
            address(out.data_ptr()),
            _Sizes(
                kv_heads,
                page,
                cache.stride(0) // dim,
                len(tile_ends),
                block_tables.stride(0),
                out.stride(0),
                scale,
            ),
        ],
    )
