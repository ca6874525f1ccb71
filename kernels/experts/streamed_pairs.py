"""Both products of experts in 16 bits for some pairs each, in one kernel of a Hopper GPU.

The kernel is kernels/cuda/source/expert_stream.cu. The pairs are sorted by expert
(sorted_pairs.py). Reading the experts' matrices takes the time, and never stops between the
two products.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import cubin
from sidestep.kernels.cuda.launcher import Kernel, Kernels
from sidestep.kernels.cuda.tile_maps import tile_map
from sidestep.kernels.cuda.wgmma_source import kind_of, wgmma_source
from sidestep.kernels.experts.common.cuda_options import Activation, options_of
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import StreamConfigs
from sidestep.kernels.experts.common.sorted_pairs import SortedPairs
from sidestep.kernels.launch import cdiv, num_processors

_ROWS = 128
"""Rows of a matrix in an item."""
_UNIT_ROWS, _STEP_BYTES, _BOX_BYTES = 64, 256, 128
"""Rows of a matrix in a unit, and bytes of each, in two boxes of 128 for the tensor cores. The
memory is faster with 256 bytes of a row at once."""
_X_STAGES = 4
"""Steps of inputs that are loading at once."""
_SHARED = 224 << 10
"""Shared memory of a block at most."""
_MOST_AHEAD, _STAGES_AHEAD = 32, 8
"""Pairs of a tile up to which a block starts while pairs are still being sorted, and the units that
it has then. Sums of more pairs take too many registers."""
_THREADS = 384
_MOST_FIRST = 24 << 20
"""Bytes that wait in L2 at most. With 32 MiB a step is no faster than with 16."""


@dataclass(frozen=True)
class Form:
    """A form of the kernel, which is compiled for it."""

    dtype: torch.dtype
    pairs: int
    """Pairs of a tile."""
    bias: bool
    chosen: int
    activation: Activation

    @property
    def ahead(self) -> bool:
        """Whether blocks start before the pairs are sorted."""
        return self.pairs <= _MOST_AHEAD

    @property
    def stages(self) -> int:
        """Units of matrices that are loading at once."""
        room = (_SHARED // _STEP_BYTES - _X_STAGES * self.pairs) // _UNIT_ROWS
        return _STAGES_AHEAD if self.ahead else room

    @property
    def shared(self) -> int:
        """Bytes of the rings."""
        return (self.stages * _UNIT_ROWS + _X_STAGES * self.pairs) * _STEP_BYTES

    @property
    def options(self) -> dict[str, int | str]:
        """Definitions that the compiler is given."""
        return options_of(self.dtype, self.activation, self.chosen, bias=self.bias) | {
            "PAIRS": self.pairs,
            "AHEAD": int(self.ahead),
            "W_STAGES": self.stages,
            "X_STAGES": _X_STAGES,
        }


class _Sizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int) for name in ("pairs", "width", "inner_width", "experts"))


class _Operands(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "x",
            "gate_up_bias",
            "down_bias",
            "order",
            "experts",
            "used",
            "progress",
            "inner",
            "results",
        )
    )


def first_reads(gate_up: ExpertMatrix) -> Tensor:
    """Return matrices' rows that blocks read first, [N, rows, K], as many as L2 has room for.

    They are the first of gate and of up of each expert that a block begins with. So some blocks
    find what they read in L2, while others keep the memory busy.
    """
    halves = gate_up.values.unflatten(1, (2, -1)).flatten(0, 1)
    experts = cdiv(num_processors(halves.device), cdiv(halves.shape[1], _ROWS))
    most = _MOST_FIRST // halves[0, :_ROWS].nbytes // 2
    return halves[: 2 * min(experts, most), :_ROWS]


def compiled(form: Form) -> Path:
    """Return the file of the machine code for this form."""
    instruction = wgmma_source(form.pairs, kind_of(form.dtype), 16)
    return cubin("expert_stream", form.options, {"wgmma.cuh": instruction})


def _kernel(file: Path, form: Form) -> Kernel:
    return Kernel(file, "expert_stream", threads=_THREADS, shared=form.shared)


_KERNELS = Kernels(compiled, _kernel)


def multiply_streamed(
    x: Tensor,
    chosen: int,
    pairs: SortedPairs,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    activation: Activation,
    configs: StreamConfigs,
) -> Tensor:
    """Return the results of all pairs, [T * k, D], of x [T, D].

    pairs: in tiles of `configs.pairs`, with `progress` as it was sorted: it serves one call.
    activation: `gelu`, alpha and limit of a clamp.
    """
    (rows, width), inner_width = x.shape, gate_up.num_rows // 2
    inner = x.new_empty(len(pairs.experts) * configs.pairs, inner_width)
    results = x.new_empty(rows * chosen, width)
    bias = gate_up.bias is not None or down.bias is not None
    kernel = _KERNELS.to_launch(Form(x.dtype, configs.pairs, bias, chosen, activation), x)
    if kernel is None:
        return results
    parts = cdiv(inner_width, _ROWS) + cdiv(width, _ROWS)
    addresses = (
        None if one is None else one.data_ptr()
        for one in (x, gate_up.bias, down.bias, *pairs, inner, results)
    )
    kernel.launch(
        min(len(pairs.experts) * parts, num_processors(x.device)),
        [
            tile_map(gate_up.values.view(-1, width), _UNIT_ROWS, _BOX_BYTES),
            tile_map(down.values.view(-1, inner_width), _UNIT_ROWS, _BOX_BYTES),
            _Operands(*addresses),
            _Sizes(rows * chosen, width, inner_width, down.num_experts),
        ],
    )
    return results
