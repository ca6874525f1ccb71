"""Decode attention of many rows on a Hopper GPU.

The kernel is kernels/cuda/source/decode_attention.cu. One of the two warps of its blocks only
loads, which Triton has no words for.
"""

from __future__ import annotations

import copy
import ctypes
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.hopper.rows_of_cache import CacheForm, is_readable
from sidestep.kernels.cuda.compiler import cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import cdiv, num_processors
from sidestep.kernels.launch_order import check_early_reads

TILE = 32
"""Keys of a step."""
_DIMS = (64, 128, 256)
_MOST_GROUP, _MOST_TURNED = 16, 8
"""Query heads of a KV head at most, and where projections are taken. There is less room for keys
then."""
_THREADS = 64
_QUEUE = 2
"""Rows whose queries wait in shared memory."""
_NOT_THERE = -1
"""A word of a part that no block has left."""
_SHARED, _BESIDE = 226 << 10, 2 << 10
"""Shared memory of a processor, and what a block takes beside its rings."""


@dataclass(frozen=True)
class Form(CacheForm):
    """A form of the kernel, which is compiled for it."""

    next_early: bool
    read_once: bool
    projected: bool
    """Whether rows are projections, whose last keys and values are not in the cache yet."""
    norms: bool

    @property
    def _slot(self) -> int:
        """Bytes of a step's keys and values."""
        return 2 * TILE * self.dim * self.dtype.itemsize

    @property
    def _queries(self) -> int:
        """Bytes of the queries that wait."""
        columns, head = 8 * cdiv(self.group, 8), self.dim * self.dtype.itemsize
        # A key, a value, cosines and sines have as many bytes each as a query.
        return _QUEUE * (columns * (head + 16) + 4 * self.projected * head)

    @property
    def stages(self) -> int:
        """Steps of keys and values that are loading at once."""
        room = _SHARED // _blocks_of(self.dim, self.group) - _BESIDE - self._queries
        return room // self._slot

    @property
    def options(self) -> dict[str, int | str]:
        """Options of the compiler."""
        return super().options | {
            "STAGES": self.stages,
            "NEXT_EARLY": int(self.next_early),
            "READ_ONCE": int(self.read_once),
            "PROJECTED": int(self.projected),
            "WITH_NORMS": int(self.norms),
        }

    @property
    def shared(self) -> int:
        """Bytes of the rings."""
        return self.stages * self._slot + self._queries


class _Sizes(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int)
            for name in (
                "kv_heads",
                "page",
                "block_rows",
                "plan",
                "q_stride",
                "table_stride",
                "out_stride",
                "least",
                "early",
            )
        ),
        ("scale", ctypes.c_float),
    )


class _Turning(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "q_norm", "k_norm")),
        ("eps", ctypes.c_float),
    )

    @classmethod
    def of(cls, rope: Rope | None) -> _Turning:
        """Return the operands of norms and of a rotation."""
        if rope is None:
            return cls()
        given = rope.cos, rope.sin, *(rope.norms or (None, None))
        return cls(*(None if one is None else one.data_ptr() for one in given), rope.eps)


class _Rows(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("tables", "slots", "lengths", "ends"))


def _blocks_of(dim: int, group: int) -> int:
    """Return the blocks that share a processor."""
    return 2 if dim > 128 else 3 if dim > 64 and group > 8 else 4


class HopperScratch:
    """Scratch memory of a launch."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        group = num_heads // num_kv_heads
        self._kv_heads, self._each = num_kv_heads, _blocks_of(head_dim, group)
        self.blocks = self._blocks_on(num_processors(device))
        size = self.blocks * cdiv(group, 8), 8 * head_dim + 16
        self.parts = torch.full(size, _NOT_THERE, dtype=torch.int32, device=device)
        """Sums and softmax of the part of a row that a block leaves to another one, in float32.
        Between launches, nothing is there."""

    def _blocks_on(self, processors: int) -> int:
        """Return the blocks of a launch on this number of processors."""
        return processors * self._each // self._kv_heads * self._kv_heads

    def on(self, processors: int) -> HopperScratch:
        """Return the same memory for launches on fewer processors."""
        part = copy.copy(self)
        part.blocks = self._blocks_on(processors)
        return part

    @classmethod
    def of(
        cls, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> HopperScratch | None:
        """Return scratch memory, or None for heads or a device that the kernel does not take."""
        heads = num_heads // num_kv_heads <= _MOST_GROUP and head_dim in _DIMS
        if not heads or not is_hopper(device) or num_kv_heads > num_processors(device):
            return None
        return cls(num_heads, num_kv_heads, head_dim, device)


def takes(cache: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the kernel takes queries of a type and such a cache."""
    return is_readable(cache, dtype, _DIMS)


def turns(rope: Rope, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> bool:
    """Return whether the kernel takes projections of such heads, and rotates them."""
    plain = all(norm.dtype == dtype for norm in rope.norms or ())
    return plain and num_heads // num_kv_heads <= _MOST_TURNED


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    return cubin("decode_attention", form.options, {})


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, "decode_attention", threads=_THREADS, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def decode_hopper(
    q: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    tile_ends: Tensor,
    out: Tensor,
    scratch: HopperScratch,
    *,
    num_heads: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
    min_tiles: int,
    next_early: bool,
    read_once: bool,
    keys_are_old: bool,
    rope: Rope | None,
) -> None:
    """Compute what `decode_attention` does for one query a row, from a plan with tiles of TILE.

    scale: of scores in units of ln 2. min_tiles: the least tiles of a share. next_early: whether
    the next kernel may start while keys and values are loading. read_once: whether L2 gives these
    up before other lines. keys_are_old, rope: see decode_attention.
    """
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads = twice_kv_heads // 2
    check_early_reads(
        "decode_attention",
        block_tables=block_tables,
        slots=slots,
        seq_lens=seq_lens,
        tile_ends=tile_ends,
    )
    box, group = math.gcd(page, TILE), num_heads // kv_heads
    how = sinks is not None, next_early, read_once, rope is not None
    norms = rope is not None and rope.norms is not None
    form = Form(q.dtype, dim, group, box, window, *how, norms)
    kernel = _KERNELS.to_launch(form, q)
    if kernel is None:
        return
    address = ctypes.c_void_p
    kernel.launch(
        scratch.blocks,
        [
            address(q.data_ptr()),
            address(cache.data_ptr()),
            _Rows(*(x.data_ptr() for x in (block_tables, slots, seq_lens, tile_ends))),
            _Turning.of(rope),
            address(None if sinks is None else sinks.data_ptr()),
            address(scratch.parts.data_ptr()),
            address(out.data_ptr()),
            _Sizes(
                kv_heads,
                page,
                cache.stride(0) // dim,
                len(tile_ends),
                q.stride(0),
                block_tables.stride(0),
                out.stride(0),
                min_tiles,
                keys_are_old,
                scale,
            ),
        ],
    )
