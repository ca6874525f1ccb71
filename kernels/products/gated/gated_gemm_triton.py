"""silu(x gate^T) * (x up^T) for tens to hundreds of rows, as one product on the tensor cores.

The product ends in the activation. A tile is some rows of x by n columns of the gate and the same n
columns of the other half, so that its end has both. The two halves of W are read as one operand (W
seen as [2, F, K]). The programs, one or more a multiprocessor, take tile after tile. The tiles of
the same part of W are neighbours and run at the same time, so W is read once from memory and then
from L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestep.kernels.l2_triton import prefetch
from sidestep.kernels.launch import cdiv, has_pdl, num_processors, pdl
from sidestep.kernels.products.gated.tuned_gated import GATED
from sidestep.kernels.triton.silu_mul_triton import gated_silu


@dataclass(frozen=True)
class GatedConfig:
    """Tile of a gated product: rows of x, columns of each half, and step along K.

    benchmarks/kernels/gpu_kernels.py tunes it.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 1
    """Programs for each multiprocessor; more than one if they fit."""
    bulk: bool = True
    """True if operands come through the bulk copy engine, where it can read them."""


@triton.jit
def _prefetch(weight, column, at, F, K: tl.constexpr, N: tl.constexpr):
    """Prefetch 512 bytes of each row of a tile's part of W into L2, and nothing behind W."""
    both = tl.arange(0, 2 * N)
    rows = (
        weight
        + (tl.minimum(column + both % N, F - 1) + both // N * F).to(tl.int64) * K
        + tl.minimum(at, K - 256)
    )
    prefetch(rows, 512)


@triton.jit
def _operands(
    x,
    weight,
    x_tiles,
    w_tiles,
    row,
    column,
    at,
    T,
    F,
    x_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    BULK: tl.constexpr,
):
    """Return rows of x, [M, STEP], and rows of the gate over those of the other half, [2 N, STEP].

    Columns beyond K are zero. Rows beyond the last have any values; they only have to be readable.
    """
    if BULK:
        value = x_tiles.load([row, at])
        w = w_tiles.load([0, column, at]).reshape(2 * N, STEP)
    else:
        both = tl.arange(0, 2 * N)
        steps = at + tl.arange(0, STEP)
        rows = tl.minimum(row + tl.arange(0, M), T - 1)
        columns = tl.minimum(column + both % N, F - 1) + both // N * F
        given = x + rows[:, None].to(tl.int64) * x_stride + steps[None, :]
        source = weight + columns[:, None].to(tl.int64) * K + steps[None, :]
        if K % STEP == 0:
            value = tl.load(given)
            w = tl.load(source)
        else:
            value = tl.load(given, mask=(steps < K)[None, :], other=0.0)
            w = tl.load(source, mask=(steps < K)[None, :], other=0.0)
    return value, w


# If the compiler knew that there is one row of tiles, it would keep the addresses of all results
# over the loop.
@triton.jit(do_not_specialize=["T", "row_tiles", "tiles"])
def _gated_gemm(
    x,
    weight,
    x_tiles,
    w_tiles,
    out,
    T,
    F,
    row_tiles,
    tiles,
    x_stride,
    out_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    STEP: tl.constexpr,
    BULK: tl.constexpr,
    PDL: tl.constexpr,
):
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    programs = tl.num_programs(0)
    first = tl.program_id(0)
    if PDL:
        if BULK and K >= 256:  # where W is aligned
            _prefetch(weight, first // row_tiles * N, 0, F, K, N)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # One loop covers the steps of all tiles, so that the next tile is loading while one ends.
    acc = tl.zeros([M, 2 * N], tl.float32)
    for index in tl.range(0, tl.cdiv(tiles - first, programs) * STEPS):
        tile = first + index // STEPS * programs
        step = index % STEPS
        row = tile % row_tiles * M
        column = tile // row_tiles * N
        value, w = _operands(
            x,
            weight,
            x_tiles,
            w_tiles,
            row,
            column,
            step * STEP,
            T,
            F,
            x_stride,
            K,
            M,
            N,
            STEP,
            BULK,
        )
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
        if step == STEPS - 1:
            gate, up = acc.reshape(M, 2, N).permute(0, 2, 1).split()
            rows = row + tl.arange(0, M)
            columns = column + tl.arange(0, N)
            tl.store(
                out + rows[:, None].to(tl.int64) * out_stride + columns[None, :],
                gated_silu(gate, up, out.dtype.element_ty).to(out.dtype.element_ty),
                mask=(rows < T)[:, None] & (columns < F)[None, :],
            )
            acc = tl.zeros([M, 2 * N], tl.float32)


def default_config(tokens: int) -> GatedConfig:
    """Return the configuration for sizes that were not measured."""
    if tokens <= 64:
        return GatedConfig(64, 64, 64, 4, 4, programs=2)
    if tokens <= 128:
        return GatedConfig(128, 128, 64, 8, 4)
    return GatedConfig(256, 64, 64, 8, 4)


def choose(
    tokens: int, num_outputs: int, num_inputs: int, device: torch.device
) -> GatedConfig | None:
    """Return the configuration measured to be faster than the library's product and its activation.

    Return None where the library is used. Configurations are for Hopper GPUs, which have the
    hardware that they need.
    """
    if not has_pdl(device):
        return None
    for rows, fields in GATED.get((num_outputs, num_inputs), ()):
        if tokens <= rows:
            return None if fields is None else GatedConfig(*fields)
    return None


def _can_be_bulk(x: Tensor, weight: Tensor) -> bool:
    """Return whether the copy engine can read x and W: rows begin at multiples of 16 bytes."""
    aligned = x.device.type == "meta" or (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return (
        aligned
        and x.stride(0) * x.element_size() % 16 == 0
        and weight.stride(0) * x.element_size() % 16 == 0
    )


def gated_gemm(x: Tensor, weight: Tensor, *, config: GatedConfig | None = None) -> Tensor:
    """Return silu(x gate^T) * (x up^T), [T, F].

    x is [T, K] with contiguous rows; W is [2 F, K], contiguous, the gate's rows first.
    """
    tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    c = config or default_config(tokens)
    out = torch.empty(tokens, num_outputs, dtype=x.dtype, device=x.device)
    row_tiles = cdiv(tokens, c.block_m)
    tiles = row_tiles * cdiv(num_outputs, c.block_n)
    programs = min(tiles, num_processors(x.device) * c.programs)
    bulk = c.bulk and _can_be_bulk(x, weight)
    x_tiles, w_tiles = x, weight
    if bulk:
        x_tiles = TensorDescriptor(
            x, [tokens, num_inputs], [x.stride(0), 1], [c.block_m, c.block_k]
        )
        w_tiles = TensorDescriptor(
            weight,
            [2, num_outputs, num_inputs],
            [num_outputs * num_inputs, num_inputs, 1],
            [2, c.block_n, c.block_k],
        )
    _gated_gemm[(programs,)](
        x,
        weight,
        x_tiles,
        w_tiles,
        out,
        tokens,
        num_outputs,
        row_tiles,
        tiles,
        x.stride(0),
        out.stride(0),
        num_inputs,
        c.block_m,
        c.block_n,
        c.block_k,
        bulk,
        num_warps=c.num_warps,
        num_stages=c.num_stages,
        **pdl(x),
    )
    return out
