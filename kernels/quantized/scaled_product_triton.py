"""x W^T where both are in 8 bits, on the tensor cores for 8 bits, for many rows of x.

Products of e4m3 are promoted after each 128 columns, since Hopper's tensor cores keep about 14 bits
of such sums. There, the scales of groups of 128 columns are applied too. Sums of int8 are exact in
32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, has_pdl, pdl
from sidestep.kernels.ops.rms_norm import QuantizedRows
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix
from sidestep.kernels.triton.silu_mul_triton import gated_silu

_COLUMNS = 128
"""Rows of W of a program; a gated product has half of them from each half."""


@triton.jit(do_not_specialize=["T", "row_tiles"])
def _scaled_product(
    codes,
    row_scales,
    weight,
    scales,
    bias,
    out,
    T,
    N,
    row_tiles,
    out_stride,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    BN: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    tile = tl.program_id(0) // row_tiles
    rows = tl.program_id(0) % row_tiles * M + tl.arange(0, M)
    place = tl.arange(0, BN)
    if GATED:
        HALF: tl.constexpr = BN // 2
        n = tl.minimum(tile * HALF + place % HALF, N - 1) + place // HALF * N
        total = N * 2
    else:
        n = tl.minimum(tile * BN + place, N - 1)
        total = N
    columns = tl.arange(0, STEP)
    own_rows = tl.minimum(rows, T - 1).to(tl.int64)
    x = codes + own_rows[:, None] * (STEPS * STEP) + columns[None, :]
    w = weight + n[:, None].to(tl.int64) * (STEPS * STEP) + columns[None, :]
    group_row, per_group = n // HEIGHT, (total + HEIGHT - 1) // HEIGHT
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    INTEGERS: tl.constexpr = codes.dtype.element_ty == tl.int8
    acc = tl.zeros([M, BN], tl.int32 if INTEGERS else tl.float32)
    for step in range(STEPS):
        value, numbers = tl.load(x + step * STEP), tl.load(w + step * STEP)
        if INTEGERS:
            acc = tl.dot(value, numbers.T, acc, out_dtype=tl.int32)
        elif GROUP == 0:
            acc += tl.dot(value, numbers.T)
        else:
            row_scale = tl.load(row_scales + own_rows * STEPS + step)
            scale = tl.load(scales + step * STEP // GROUP * per_group + group_row)
            acc += tl.dot(value, numbers.T) * row_scale[:, None] * scale[None, :]
    result = acc.to(tl.float32)
    if GROUP == 0:
        result *= tl.load(row_scales + own_rows)[:, None] * tl.load(scales + group_row)[None, :]
    if bias is not None:
        result += tl.load(bias + n).to(tl.float32)[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    if GATED:
        gate, up = result.reshape(M, 2, BN // 2).permute(0, 2, 1).split()
        result = gated_silu(gate, up, dtype)
        outputs = tile * (BN // 2) + tl.arange(0, BN // 2)
    else:
        outputs = tile * BN + place
    target = out + rows[:, None].to(tl.int64) * out_stride + outputs[None, :]
    inside = (rows < T)[:, None] & (outputs < N)[None, :]
    if ADD:
        result += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, result.to(dtype), mask=inside)


def scaled_product(
    x: QuantizedRows,
    matrix: DeviceMatrix,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    add: bool = False,
) -> Tensor:
    """Return out [T, N], to which x W^T + b is written, or added if `add`.

    gated: W is the gate's matrix over the other's, and silu(gate) * up is written.
    """
    tokens, outputs = out.shape
    height, width = matrix.group
    # Older GPUs have less shared memory, and need registers for both operands.
    rows, stages = (128, 4) if has_pdl(out.device) else (64, 3)
    row_tiles = cdiv(tokens, rows)
    tiles = cdiv(outputs, _COLUMNS // (1 + gated))
    weight = matrix.words.view(x.codes.dtype)
    _scaled_product[(tiles * row_tiles,)](
        x.codes,
        x.scales,
        weight,
        matrix.scales,
        bias,
        out,
        tokens,
        outputs,
        row_tiles,
        out.stride(0),
        matrix.shape[1],
        width,
        height,
        STEP,
        rows,
        _COLUMNS,
        add,
        gated,
        num_warps=8,
        num_stages=stages,
        **pdl(out),
    )
    return out


def rounds_inputs(matrix: DeviceMatrix, capability: int) -> bool:
    """Return whether the matrix is multiplied with inputs in 8 bits on GPUs of this capability."""
    simple = matrix.minimums is None and matrix.dtype != torch.float32
    if matrix.rounded == "int8":
        return simple and matrix.kind == "int8" and matrix.group[1] == 0 and capability >= 80
    grouped = matrix.group[1] % STEP == 0
    fp8 = matrix.kind == matrix.rounded == "fp8"
    return simple and fp8 and grouped and capability >= 89
