"""silu(x gate^T) * (x up^T) for tens to hundreds of rows: one product on the tensor cores that ends in the activation.

A tile is some rows of x by n columns of the gate and the same n of the other half, so that its end has both; the two
halves of W are read as one operand (W seen as [2, F, K]). One program a multiprocessor takes tile after tile. The tiles
of the same part of W are neighbours, and run at the same time: W comes from memory once, and from L2 then.

Tiles rarely fill the multiprocessors evenly: 224 of them leave a seventh of 132 idle. So the last ones can be shared
out by columns of x (stream-K, Osama et al. 2023): each program gets the same number of steps along K, the first of
them often from within a tile. It leaves its part of that tile in scratch and says so; the program with the tile's
beginning, which does that last, adds what is there. Who adds what, and in what order, depends on the sizes alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestep.kernels.launch import has_pdl, num_processors, pdl
from sidestep.kernels.tuned_gated import GATED


@dataclass(frozen=True)
class GatedConfig:
    """What is tuned by benchmarks/gpu_kernels.py: rows of x, columns of each half, and step along K, of a tile."""

    block_m: int
    block_n: int
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    programs: int = 1
    """A multiprocessor; more than one if they fit."""
    split: bool = False
    """Whether the last tiles are shared out along K."""
    bulk: bool = True
    """Whether operands come through the bulk copy engine, where it can read them."""


@triton.jit
def _prefetch(weight, column, at, F, K: tl.constexpr, N: tl.constexpr):
    """Asks for 512 bytes of each row of a tile's part of W to be in L2, and for none behind W."""
    both = tl.arange(0, 2 * N)
    rows = weight + (tl.minimum(column + both % N, F - 1) + both // N * F).to(tl.int64) * K + tl.minimum(at, K - 256)
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;", "=r,l", [rows],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _operands(x, weight, x_tiles, w_tiles, row, column, at, T, F, x_stride, K: tl.constexpr, M: tl.constexpr,
              N: tl.constexpr, STEP: tl.constexpr, BULK: tl.constexpr):
    """Rows of x, [M, STEP], and rows of the gate over the same of the other half, [2 N, STEP]. Columns beyond K are
    zero; of rows beyond the last it only matters that they can be read."""
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


@triton.jit
def _activate(gate, up, dtype):
    # Rounded where the kernels that this one replaces write.
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (activated * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _as_held(half, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """[M, N] of a product in the order in which threads hold it, [.., WARPS * 32 * 4]: a thread's values side by side,
    and beside those of its neighbours, so that they go to memory and come back without changing hands."""
    half = half.reshape(M // (16 * WARPS), WARPS, 2, 8, N // 16, 2, 4, 2)
    return half.permute(0, 2, 4, 1, 3, 6, 5, 7).reshape(M * N // (WARPS * 128), WARPS * 128)


@triton.jit
def _as_product(held, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """What _as_held was given."""
    held = held.reshape(M // (16 * WARPS), 2, N // 16, WARPS, 8, 4, 2, 2)
    return held.permute(0, 3, 1, 4, 2, 6, 5, 7).reshape(M, N)


@triton.jit
def _place(partials, program, half, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr):
    """Where a program leaves half of its part of a tile."""
    wide = tl.arange(0, WARPS * 128)[None, :] + tl.arange(0, M * N // (WARPS * 128))[:, None] * (WARPS * 128)
    return partials + (program * 2 + half).to(tl.int64) * (M * N) + wide


@triton.jit
def _leave_part(gate, up, partials, flags, program, M: tl.constexpr, N: tl.constexpr, WARPS: tl.constexpr,
                COMPILED: tl.constexpr):
    """For the program that has the tile's beginning."""
    tl.store(_place(partials, program, 0, M, N, WARPS), _as_held(gate, M, N, WARPS), cache_modifier=".cg")
    tl.store(_place(partials, program, 1, M, N, WARPS), _as_held(up, M, N, WARPS), cache_modifier=".cg")
    if COMPILED:
        # All threads have stored. Triton's own barrier would keep it from pipelining the loop that this is in.
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r,r", [program], dtype=tl.int32, is_pure=False,
                                  pack=1)
    tl.atomic_xchg(flags + program, 1, sem="release")


@triton.jit
def _add_parts(gate, up, partials, flags, program, tile_end, total, programs, M: tl.constexpr, N: tl.constexpr,
               WARPS: tl.constexpr):
    """The parts of a tile that others have, those of the programs whose first step is before the tile's end."""
    while program * total // programs < tile_end:
        while tl.atomic_cas(flags + program, 1, 0, sem="acquire") == 0:
            pass
        part = tl.load(_place(partials, program, 0, M, N, WARPS), cache_modifier=".cg")
        gate += _as_product(part, M, N, WARPS)
        part = tl.load(_place(partials, program, 1, M, N, WARPS), cache_modifier=".cg")
        up += _as_product(part, M, N, WARPS)
        program += 1
    return gate, up


@triton.jit
def _step_at(index, first, shared_steps, whole, programs, STEPS: tl.constexpr):
    """Which of all tiles' steps is a program's index-th: its shared ones come first, in a row; then tiles of its
    own."""
    beyond = index - shared_steps
    own = (whole + beyond // STEPS * programs) * STEPS + beyond % STEPS
    return tl.where(index < shared_steps, first + index, own)


# Knowing that there is one row of tiles, the compiler would keep the addresses of all results over the loop.
@triton.jit(do_not_specialize=["T", "row_tiles", "tiles", "shared"])
def _gated_gemm(x, weight, x_tiles, w_tiles, out, partials, flags, T, F, row_tiles, tiles, shared, x_stride, out_stride,
                K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr,
                BULK: tl.constexpr, WARPS: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr):
    # 1. Which steps. A part is needed by the program before its own, which may start after it: none waits for one that
    # has yet to start.
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    programs = tl.num_programs(0)
    program = programs - 1 - tl.program_id(0)
    total = shared * STEPS
    first = program * total // programs
    shared_steps = (program + 1) * total // programs - first
    whole = shared + tl.program_id(0)
    steps = shared_steps + tl.cdiv(tl.maximum(tiles - whole, 0), programs) * STEPS
    if PDL:
        if BULK and K >= 256:  # where W is aligned
            step = _step_at(0, first, shared_steps, whole, programs, STEPS)
            _prefetch(weight, step // STEPS // row_tiles * N, step % STEPS * STEP, F, K, N)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # 2. One loop over the steps of all tiles, so that the next tile is on its way while one ends.
    acc = tl.zeros([M, 2 * N], tl.float32)
    for index in tl.range(0, steps):
        step = _step_at(index, first, shared_steps, whole, programs, STEPS)
        tile = step // STEPS
        row = tile % row_tiles * M
        column = tile // row_tiles * N
        value, w = _operands(x, weight, x_tiles, w_tiles, row, column, step % STEPS * STEP, T, F, x_stride, K, M, N,
                             STEP, BULK)
        acc = tl.dot(value, w.T, acc, input_precision="ieee")
        # 3. The end of a tile, or of what this program has of it.
        if (step % STEPS == STEPS - 1) | (index == shared_steps - 1):
            gate, up = acc.reshape(M, 2, N).permute(0, 2, 1).split()
            if SPLIT and tile * STEPS < first:
                _leave_part(gate, up, partials, flags, program, M, N, WARPS, COMPILED)
            else:
                if SPLIT and step % STEPS < STEPS - 1:
                    gate, up = _add_parts(gate, up, partials, flags, program + 1, (tile + 1) * STEPS, total, programs,
                                          M, N, WARPS)
                rows = row + tl.arange(0, M)
                columns = column + tl.arange(0, N)
                tl.store(out + rows[:, None].to(tl.int64) * out_stride + columns[None, :],
                         _activate(gate, up, out.dtype.element_ty), mask=(rows < T)[:, None] & (columns < F)[None, :])
            acc = tl.zeros([M, 2 * N], tl.float32)


def default_config(tokens: int) -> GatedConfig:
    """Where nothing is measured."""
    if tokens <= 64:
        return GatedConfig(64, 64, 64, 4, 4, programs=2)
    if tokens <= 128:
        return GatedConfig(128, 128, 64, 8, 4)
    return GatedConfig(256, 64, 64, 8, 4, split=True)


def choose(tokens: int, num_outputs: int, num_inputs: int, device: torch.device) -> GatedConfig | None:
    """What was measured to be faster than the library's product and the activation after it, on Hopper GPUs, which have
    what the configurations ask for; None: those two."""
    if not has_pdl(device):
        return None
    for rows, fields in GATED.get((num_outputs, num_inputs), ()):
        if tokens <= rows:
            return None if fields is None else GatedConfig(*fields)
    return None


def shared_tiles(tiles: int, steps: int, programs: int) -> int:
    """How many are shared out along K: none if they fill the programs evenly, or if parts would be too small to be
    worth putting together; else those that would be left over, and with them one tile a program, so that each tile lies
    with two programs at most."""
    shared = tiles - max(0, tiles // programs - 1) * programs
    return 0 if tiles % programs == 0 or shared * steps < 4 * programs else shared


@functools.cache
def _flags(device: torch.device, count: int) -> Tensor:
    """Zero between launches: who waits for a flag takes it down. One launch at a time may use them."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a gated product that shares tiles out must have run before it is captured in a graph")
    return torch.zeros(count, dtype=torch.int32, device=device)


def _can_be_bulk(x: Tensor, weight: Tensor) -> bool:
    """The copy engine wants rows, and their beginning, at multiples of 16 bytes."""
    aligned = x.device.type == "meta" or (x.data_ptr() | weight.data_ptr()) % 16 == 0
    return aligned and x.stride(0) * x.element_size() % 16 == 0 and weight.stride(0) * x.element_size() % 16 == 0


def gated_gemm(x: Tensor, weight: Tensor, *, config: GatedConfig | None = None) -> Tensor:
    """silu(x gate^T) * (x up^T) for x [T, K], its rows contiguous, and W [2 F, K], contiguous, the gate's rows first;
    returns [T, F]."""
    tokens, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    c = config or default_config(tokens)
    out = torch.empty(tokens, num_outputs, dtype=x.dtype, device=x.device)
    row_tiles = triton.cdiv(tokens, c.block_m)
    tiles = row_tiles * triton.cdiv(num_outputs, c.block_n)
    programs = num_processors(x.device) * c.programs
    shared = shared_tiles(tiles, triton.cdiv(num_inputs, c.block_k), programs) if c.split else 0
    partials, flags = out, out
    if shared:
        partials = torch.empty(programs, 2, c.block_m, c.block_n, dtype=torch.float32, device=x.device)
        flags = _flags(x.device, programs)
    bulk = c.bulk and _can_be_bulk(x, weight)
    x_tiles, w_tiles = x, weight
    if bulk:
        x_tiles = TensorDescriptor(x, [tokens, num_inputs], [x.stride(0), 1], [c.block_m, c.block_k])
        w_tiles = TensorDescriptor(weight, [2, num_outputs, num_inputs], [num_outputs * num_inputs, num_inputs, 1],
                                   [2, c.block_n, c.block_k])
    _gated_gemm[(programs if shared else min(programs, tiles),)](
        x, weight, x_tiles, w_tiles, out, partials, flags, tokens, num_outputs, row_tiles, tiles, shared,
        x.stride(0), out.stride(0), num_inputs, c.block_m, c.block_n, c.block_k, shared > 0, bulk,
        min(c.num_warps, c.block_m // 16), x.device.type != "cpu", num_warps=c.num_warps, num_stages=c.num_stages,
        **pdl(x))
    return out
