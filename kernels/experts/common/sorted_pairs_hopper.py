"""Sorting of the pairs of a token and an expert by their experts, on a Hopper GPU.

The kernels are kernels/cuda/source/sort_pairs.cu. Their blocks share out the pairs. In Triton, the
programs of each expert read all of them.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles, cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels, runs_or_compiles
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import cdiv, num_processors

_WARPS = 16
"""Warps of a block, which have parts of its share."""
_LEAST_SHARE, _PART_STEP = 256, 16
"""Pairs of a share at least, and what those of a warp's part are a multiple of."""
_MOST_COUNTED_BY_ALL = 16384
"""Pairs up to which each block counts all of them, and there is no kernel before it."""
_COUNTS_OF_PAIR = 24
"""Counts of a share and an expert that a block reads in the time that it takes for a pair."""
_MOST_EXPERTS = 2048
"""Experts whose counts have room in shared memory."""


class Form(NamedTuple):
    """A kernel, and the size of its shared memory."""

    name: str
    shared: int
    """Bytes."""


class _Sizes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("pairs", "part", "experts", "in_tile", "tiles")
    )


class _Sorted(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in SortedPairs._fields)


def compiled(_: Form) -> Path:
    """Return the file of the machine code, which is the same for all forms."""
    return cubin("sort_pairs", {"WARPS": _WARPS}, {})


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, form.name, threads=32 * _WARPS, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def suits(ids: Tensor, num_experts: int) -> bool:
    """Return whether the kernels sort these pairs."""
    here = is_hopper(ids.device) and runs_or_compiles(ids) and compiles()
    return here and num_experts <= _MOST_EXPERTS


def _part(pairs: int, num_experts: int, processors: int) -> int:
    """Return the pairs of a warp.

    More shares have fewer pairs each, but all blocks read the counts of all shares.
    """
    shares = min(processors, cdiv(pairs, _LEAST_SHARE))
    if pairs > _MOST_COUNTED_BY_ALL:
        shares = min(shares, max(1, math.isqrt(_COUNTS_OF_PAIR * pairs // num_experts)))
    return cdiv(pairs, shares * _WARPS * _PART_STEP) * _PART_STEP


def sort_on_hopper(ids: Tensor, num_experts: int, in_tile: int, out: SortedPairs) -> None:
    """Write the pairs of ids [T, k] to `out`, as `sort_pairs` returns them."""
    pairs = ids.numel()
    part = _part(pairs, num_experts, num_processors(ids.device))
    blocks, row = cdiv(pairs, part * _WARPS), cdiv(num_experts, 4) * 4
    sizes = _Sizes(pairs, part, num_experts, in_tile, len(out.experts))
    given, counts = ctypes.c_void_p(ids.data_ptr()), ctypes.c_void_p()
    if pairs > _MOST_COUNTED_BY_ALL:
        memory = torch.empty(blocks * row, dtype=torch.int32, device=ids.device)
        counts = ctypes.c_void_p(memory.data_ptr())
        count = _KERNELS.to_launch(Form("count_pairs", 4 * row), ids)
        if count is not None:
            count.launch(blocks, [given, counts, sizes])
    # Rows of counts for each warp, for earlier and for later shares; and a sum for each warp.
    place = _KERNELS.to_launch(Form("place_pairs", 4 * ((_WARPS + 2) * row + _WARPS)), ids)
    if place is not None:
        addresses = _Sorted(*(one.data_ptr() for one in out))
        place.launch(blocks, [given, counts, addresses, sizes])
