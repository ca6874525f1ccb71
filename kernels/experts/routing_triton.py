"""The router of a mixture of experts in Triton: its product in float32.

The product's inputs are shared out among programs. The kernel that chooses experts
(choices_triton.py) adds their parts, always in the same order. For many rows and few experts, it
has the whole product of its rows. Where the product before the router has summed the
squares of the stream, the programs also norm their inputs, so that no kernel of its own does.

An expert that takes every token may be one more expert behind the others. Its gate is one more row
of the router's weights then, and it is the last one of each row's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.ahead import Ahead
from sidestep.kernels.experts.choices_triton import MOST_EXPERTS, STEP, whole_product
from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import completes
from sidestep.kernels.ops.rms_norm import BegunNorm, Stream
from sidestep.kernels.ops.routing import Choice, Joined, Undecided

_SINGLE_ROWS = 4
"""Tokens up to which each is multiplied by itself, with one expert a program."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Tokens of a program of the product. 16 are the fewest that the tensor cores multiply."""
_COLUMNS, _STEP = 32, 256
"""Experts and inputs of such a program, which loads all its numbers at once. Where a few programs
looped over them, a step of one row waited for the memory 32 times a layer."""
_TILED_ROWS, _TILE_COLUMNS = 4096, 128
"""Tokens from which programs have more experts and loop over all inputs, and these experts. There
are enough programs then, and the parts of their products would be many bytes."""
_ALIGNED = 8
"""Inputs of which a program's share is a multiple, so that threads write 16 bytes at once."""


@completes("parts")
@triton.jit(do_not_specialize=["T"])
def _router_product(
    x,
    weight,
    norm,
    squares,
    normed,
    eps,
    parts,
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    SQUARES: tl.constexpr,
    SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a part of the product in float32, that of STEP inputs: parts [D / STEP, T, WIDE].

    SQUARES: parts of the sum of each row's squares. With them, x is normed first, and the programs
    of the first experts write the result.
    """
    rows = tl.program_id(0) * M + tl.arange(0, M)
    experts = tl.program_id(1) * N + tl.arange(0, N)
    steps = tl.program_id(2) * STEP + tl.arange(0, STEP)
    inside = (steps < D)[None, :]
    readable = tl.minimum(experts, E - 1)[:, None]
    w = tl.load(weight + readable * D + steps[None, :], mask=inside, other=0.0)
    if SQUARES > 0:
        factor = tl.load(norm + steps, mask=steps < D, other=0.0).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tokens = tl.minimum(rows, T - 1).to(tl.int64)[:, None]
    value = tl.load(x + tokens * D + steps[None, :], mask=inside, other=0.0)
    if SQUARES > 0:
        each = tl.arange(0, SUMMED)[None, :]
        sums = tl.load(squares + tokens * SQUARES + each, mask=each < SQUARES, other=0.0)
        scale = tl.rsqrt(tl.sum(sums, 1) / D + eps)[:, None]
        dtype: tl.constexpr = x.dtype.element_ty
        value = ((value.to(tl.float32) * scale).to(dtype).to(tl.float32) * factor).to(dtype)
        own = tl.where(tl.program_id(1) == 0, T, 0)
        tl.store(normed + tokens * D + steps[None, :], value, mask=inside & (rows < own)[:, None])
    product = tl.dot(value, w.T, input_precision="ieee")
    target = parts + (tl.program_id(2).to(tl.int64) * T + rows[:, None]) * WIDE + experts[None, :]
    tl.store(target, product, mask=(rows < T)[:, None] & (experts < E)[None, :])


@completes("product")
@triton.jit(do_not_specialize=["T"])
def _router_tiles(
    x,
    weight,
    product,
    T,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the whole product of M rows and N experts."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    experts = tl.program_id(1) * N + tl.arange(0, N)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    acc = whole_product(x, weight, rows, experts, T, D, E, STEP)
    target = product + rows.to(tl.int64)[:, None] * WIDE + experts[None, :]
    tl.store(target, acc, mask=(rows < T)[:, None] & (experts < E)[None, :])


@completes("logits")
@triton.jit
def _router_rows(
    x,
    weight,
    norm,
    squares,
    normed,
    eps,
    logits,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARE: tl.constexpr,
    SQUARES: tl.constexpr,
    SUMMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the whole product of a row and an expert's weights.

    SQUARES: as in _router_product. With them, an expert's program writes SHARE inputs' norms.
    """
    expert, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    steps = tl.arange(0, WIDTH)
    w = tl.load(weight + expert * D + steps, mask=steps < D, other=0.0)
    if SQUARES > 0:
        factor = tl.load(norm + steps, mask=steps < D, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + row * D + steps, mask=steps < D, other=0.0)
    if SQUARES > 0:
        each = tl.arange(0, SUMMED)
        sums = tl.load(squares + row * SQUARES + each, mask=each < SQUARES, other=0.0)
        scale = tl.rsqrt(tl.sum(sums, 0) / D + eps)
        dtype: tl.constexpr = x.dtype.element_ty
        value = ((value.to(tl.float32) * scale).to(dtype).to(tl.float32) * factor).to(dtype)
    product = tl.sum(value.to(tl.float32) * w.to(tl.float32), 0)
    tl.store(logits + row * WIDE + expert, product)
    if SQUARES > 0:
        own = (steps // SHARE == expert) & (steps < D)
        tl.store(normed + row * D + steps, value, mask=own)


class _Norming(NamedTuple):
    """A norm that is computed with the product."""

    weight: Tensor
    """[D]"""
    squares: Tensor
    """See BegunNorm."""
    out: Tensor
    """[T, D]: memory for the result."""
    eps: float


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    choice: Choice,
    own: range | None = None,
    product_bias: Tensor | None = None,
    *,
    joined: Joined | None = None,
    norming: _Norming | None = None,
) -> Undecided:
    """Multiply the rows of x [T, D], contiguous, with the router's weights.

    Where there are many rows and few experts, the product is left to the kernel that chooses.

    weight: [E, D] in x's type. bias: float32 [E], added to the scores for the choice. own: this
    rank's experts, from which they are numbered; None for all. product_bias: float32 [E], added to
    the product with the weight. joined: the expert with the number E, which each row has too, as
    the last one. norming: the norm of x, if x is not normed yet.
    """
    is_gated = joined is not None and joined.gated
    experts = weight.shape[0] - is_gated
    own = range(experts) if own is None else own
    tiled = norming is None and len(x) >= _TILED_ROWS
    if tiled and not is_gated and experts <= MOST_EXPERTS:
        return Undecided(x[None], experts, choice, bias, product_bias, own, joined, weight)
    parts = _product(x, weight, norming)
    return Undecided(parts, experts, choice, bias, product_bias, own, joined)


def _product(x: Tensor, weight: Tensor, norming: _Norming | None) -> Tensor:
    """Return the parts of the product; see Undecided."""
    (rows, width), outputs, kind = x.shape, weight.shape[0], pdl(x)
    # Rows of whole 16 bytes, so that a thread loads four numbers at once.
    wide = cdiv(outputs, 4) * 4
    summed = 0 if norming is None else norming.squares.shape[1]
    sums = summed, next_power_of_2(max(1, summed))
    operands = x, weight, *((None, None, None, 0.0) if norming is None else norming)
    alone, tiled = rows <= _SINGLE_ROWS, norming is None and rows >= _TILED_ROWS
    num_parts = 1 if alone or tiled else cdiv(width, _STEP)
    parts = x.new_empty(num_parts, rows, wide, dtype=torch.float32)
    if rows == 0:
        return parts
    if alone:
        share = cdiv(width, outputs * _ALIGNED) * _ALIGNED
        filled = next_power_of_2(width)
        _router_rows[(outputs, rows)](
            *operands, parts, width, wide, filled, share, *sums, num_warps=4, **kind
        )
        return parts
    if tiled:
        columns = min(_TILE_COLUMNS, max(_COLUMNS, next_power_of_2(outputs)))
        _router_tiles[(cdiv(rows, _MANY_ROWS), cdiv(outputs, columns))](
            x,
            weight,
            parts,
            rows,
            width,
            outputs,
            wide,
            _MANY_ROWS,
            columns,
            STEP,
            num_warps=4,
            num_stages=4,
            **kind,
        )
        return parts
    at_once = _FEW_ROWS if rows <= 4 * _FEW_ROWS else _MANY_ROWS
    grid = cdiv(rows, at_once), cdiv(outputs, _COLUMNS), num_parts
    tile = at_once, _COLUMNS, _STEP
    _router_product[grid](
        *operands, parts, rows, width, outputs, wide, *tile, *sums, num_warps=4, **kind
    )
    return parts


def route_stream(
    stream: Stream,
    weight: Tensor,
    bias: Tensor | None,
    choice: Choice,
    own: range | None = None,
    product_bias: Tensor | None = None,
    *,
    joined: Joined | None = None,
    then: Tensor | None = None,
) -> tuple[Tensor, Undecided]:
    """Return the norm of a stream, and its rows' product as `route` does.

    then: what the experts read first, which a kernel for the norm asks for (see Ahead).
    """
    router = weight, bias, choice, own, product_bias
    if stream.done is not None or not isinstance(stream.begun, BegunNorm):
        normed = stream.normed(None if then is None else Ahead(weight, then))
        return normed, route(normed, *router, joined=joined)
    norming = _Norming(
        stream.norm.weight, stream.begun.squares, torch.empty_like(stream.hidden), stream.norm.eps
    )
    return norming.out, route(stream.hidden, *router, joined=joined, norming=norming)
