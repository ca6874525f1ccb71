"""A coded matrix as the numbers that it stands for, for a library's product with many rows.

Each number is rounded once, to the type of the products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.quantized.decoding_triton import numbers, without_zero, zero_of
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

_ROWS = 64


@triton.jit
def _decode_matrix(
    words,
    scales,
    minimums,
    out,
    N,
    per_group,
    KIND: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    HEIGHT: tl.constexpr,
    ZEROS: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    IN_WORD: tl.constexpr,
    PDL: tl.constexpr,
):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.minimum(rows, N - 1)
    at = tl.program_id(1) * STEP
    W: tl.constexpr = (K + STEP - 1) // STEP * STEP // IN_WORD
    codes = tl.arange(0, STEP // IN_WORD)
    words += n[:, None].to(tl.int64) * W + at // IN_WORD + codes[None, :]
    wide: tl.constexpr = out.dtype.element_ty
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= STEP else STEP // GROUP
    group = tl.arange(0, GROUPS) + (at // GROUP if GROUP else 0)
    inside = (group * GROUP < K)[None, :]
    place = (n // HEIGHT)[:, None] + (group * per_group)[None, :]
    scale = tl.load(scales + place, mask=inside, other=0.0)
    v = numbers(tl.load(words), None, KIND, wide, BN, STEP).to(tl.float32)
    v = v.reshape(BN, GROUPS, STEP // GROUPS)
    if ZEROS:
        v -= (zero_of(scale) - 8).to(tl.float32)[:, :, None]
        scale = without_zero(scale)
    v *= scale[:, :, None]
    if minimums is not None:
        v -= tl.load(minimums + place, mask=inside, other=0.0)[:, :, None]
    columns = at + tl.arange(0, STEP)
    target = out + rows[:, None].to(tl.int64) * K + columns[None, :]
    if PDL:
        # Kernels before this one may still read the same memory, for another matrix.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = (rows < N)[:, None] & (columns < K)[None, :]
    tl.store(target, v.reshape(BN, STEP).to(wide), mask=there)


def decode_matrix(matrix: DeviceMatrix) -> Tensor:
    """Return the numbers [N, K], in the type of the products, in new memory."""
    rows, columns = matrix.shape
    out = torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device)
    height, width = matrix.group
    _decode_matrix[(cdiv(rows, _ROWS), cdiv(columns, STEP))](
        matrix.words,
        matrix.scales,
        matrix.minimums,
        out,
        rows,
        matrix.scales.shape[1],
        matrix.kind,
        columns,
        width,
        height,
        matrix.zeros,
        _ROWS,
        STEP,
        matrix.in_word,
        num_warps=4,
        **pdl(out),
    )
    return out
