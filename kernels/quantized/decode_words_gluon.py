"""A coded matrix as the numbers that it stands for, as fast as memory takes them.

The kernel is for codes whose rows, or groups of at least 128 columns, share a scale. It is that of
decode_matrix_triton.py otherwise.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sidestep.kernels.launch import cdiv, pdl
from sidestep.kernels.quantized.decoding_gluon import decoded, words_layout
from sidestep.kernels.quantized.decoding_triton import without_zero, zero_of
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix

_ROWS = 64


@gluon.jit
def _decode_words(
    words,
    scales,
    out,
    N,
    K,
    KIND: gl.constexpr,
    GROUP: gl.constexpr,
    HEIGHT: gl.constexpr,
    ZEROS: gl.constexpr,
    BN: gl.constexpr,
    STEP: gl.constexpr,
    WORDS: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    CODES: gl.constexpr = words_layout(BN, 4, WORDS)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    FIRST: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row, step = gl.program_id(1) * BN, gl.program_id(0)
    n = gl.minimum(row + gl.arange(0, BN, layout=gl.SliceLayout(1, CODES)), N - 1)
    place = gl.arange(0, WORDS, layout=gl.SliceLayout(0, CODES))
    width = gl.cdiv(K, STEP) * WORDS
    given = gl.load(words + n.to(gl.int64)[:, None] * width + (step * WORDS + place)[None, :])
    group = 0
    if GROUP != 0:
        group = step * STEP // GROUP
    scale = gl.load(scales + group * gl.cdiv(N, HEIGHT) + n // HEIGHT)
    zero = None
    if ZEROS:
        zero, scale = zero_of(scale), without_zero(scale)
    v = gl.convert_layout(decoded(given, zero, None, KIND, dtype, BN, STEP), FIRST)
    scale = gl.convert_layout(scale, gl.SliceLayout(1, FIRST))
    v = (v.to(gl.float32) * scale[:, None]).to(dtype)
    rows = row + gl.arange(0, BN, layout=gl.SliceLayout(1, LINES))
    columns = step * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, LINES))
    target = out + rows.to(gl.int64)[:, None] * K + columns[None, :]
    if PDL:
        # Kernels before this one may still read the same memory, for another matrix.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    there = (rows < N)[:, None] & (columns < K)[None, :]
    gl.store(target, gl.convert_layout(v, LINES), mask=there)


def decode_words(matrix: DeviceMatrix) -> Tensor:
    """Return the numbers [N, K], in the type of the products, in new memory."""
    rows, columns = matrix.shape
    out = torch.empty(rows, columns, dtype=matrix.dtype, device=matrix.device)
    height, width = matrix.group
    words = STEP // matrix.in_word
    _decode_words[(cdiv(columns, STEP), cdiv(rows, _ROWS))](
        matrix.words,
        matrix.scales,
        out,
        rows,
        columns,
        matrix.kind,
        width,
        height,
        matrix.zeros,
        _ROWS,
        STEP,
        words,
        num_warps=4,
        **pdl(out),
    )
    return out
