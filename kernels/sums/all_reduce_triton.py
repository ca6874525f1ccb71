"""All-reduce of a row-parallel product, the addition to the residual stream and the next norm.

One kernel does all three. Each rank has a *space*: memory of the same layout that all ranks can
read and write. The product before writes this rank's part into a *buffer* of its own space, and a
kernel here sums the parts of all ranks. It adds them in the order of the ranks, in float32, and
rounds once. So every rank gets the same sum to the bit, and so do all three kinds of kernels:

- Pushed, for few rows: each rank writes its part to all others, and there is no barrier
  (kernels/sums/pushed_sum_triton.py).
- One shot: each rank reads all parts of all rows. There is one barrier between the ranks.
- Two shots, for many rows: each rank sums its own rows, leaves the sums in its buffer, and reads
  the sums of the other ranks. There are two barriers, and each rank reads two parts' worth instead
  of as many parts as there are ranks.

The rest of this text is about the last two kinds.

**The barrier.** Program p of a kernel waits for program p of the same kernel on the other ranks,
and for no other program. It writes its epoch into a flag in each rank's space (a flag has one
writer) and waits until its own flags have all reached that epoch. Epochs only grow, so no flag is
ever reset, a graph is replayed unchanged, and a rank that is ahead may already have written a later
epoch. The program's last epoch is in this rank's `counters`, on the device.

**Visibility of the parts.** A part was written by an earlier kernel on the same stream or, in the
second shot, by threads that a block-level barrier orders before the flag. The flag is written with
release and read with acquire semantics at system scope, and a block-level barrier orders the other
threads' reads after it. `gdc_wait` comes before all of this.

**No part is overwritten too early.** A rank that has ended sum n has passed a barrier with all
others in it. They had begun sum n by then, so they had ended sum n - 1: kernels of a stream end in
order, and `gdc_wait` comes before the flags. So a rank that has ended sum n may write any part but
that of sum n itself, which others may still be reading. Hence the rule that callers keep: **two
sums, one after the other on the device, never use the same buffer.** In the second shot a rank
writes only rows of its buffer that no other rank has read before.

**No deadlock, if all ranks launch the same sums.** All of a kernel's programs fit on the device at
once, one a processor. Other kernels that run beside them end by themselves. A kernel that is
started early (programmatic dependent launch) starts only after all programs of this one have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.sums.peer_memory_triton import NUM_BUFFERS, PeerMemory, aligned, space_of
from sidestep.kernels.sums.pushed_sum_triton import _pushed, can_push
from sidestep.kernels.sums.tuned_all_reduce import SUMS

Kind = Literal["pushed", "one_shot", "two_shot"]


@dataclass(frozen=True)
class SumConfig:
    """Kind of kernel, and the largest number of programs."""

    kind: Kind
    programs: int


def choose(ranks: int, rows: int, row_bytes: int) -> SumConfig | None:
    """Return the fastest configuration for parts of this size, or None for torch.distributed.

    The tuned table of the next larger known number of ranks applies. Kernels that cannot take such
    rows are left out.
    """
    known = next((n for n in sorted(SUMS) if n >= ranks), None)
    for size, kind, programs in () if known is None else SUMS[known]:
        if rows * row_bytes <= size and (kind != "pushed" or can_push(ranks, rows, row_bytes)):
            return SumConfig(kind, programs)
    return None


def most_buffer_bytes(ranks: int, num_bytes: int) -> int:
    """Return the bytes of a buffer for parts of up to num_bytes; 0 where `choose` has no kernel."""
    known = next((n for n in sorted(SUMS) if n >= ranks), None)
    most = 0 if known is None or not SUMS[known] else SUMS[known][-1][0]
    return aligned(min(most, num_bytes))


@triton.jit
def _meet(spaces, rank, epoch, RANKS: tl.constexpr):
    """Wait until this program of all ranks has reached this epoch."""
    peer = tl.arange(0, triton.next_power_of_2(RANKS))
    there = peer < RANKS
    flags = tl.program_id(0) * RANKS
    theirs = space_of(spaces, peer, RANKS).to(tl.pointer_type(tl.int64)) + (flags + rank)
    tl.debug_barrier()
    tl.atomic_xchg(theirs, epoch, mask=there, sem="release", scope="sys")
    own = space_of(spaces, rank, RANKS).to(tl.pointer_type(tl.int64)) + (flags + peer)
    # The loop carries a scalar: Triton 3.6 does not compile a tensor there.
    least = epoch - 1
    while least < epoch:
        seen = tl.atomic_add(
            own, tl.zeros_like(peer).to(tl.int64), mask=there, sem="acquire", scope="sys"
        )
        least = tl.min(tl.where(there, seen, epoch), 0)
    tl.debug_barrier()


@triton.jit
def _rows_at(address, offset, dtype: tl.constexpr):
    """Return a pointer to the rows at an offset in a space."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _one(counter, epoch):
    """Return 1.0 in a way that makes the loads before it start together.

    All loads must be on their way before the program waits for one of them. The assembler would
    rather save registers and issue them in turns, each of which takes a round trip to another GPU.
    It cannot multiply before it has this factor, which is loaded behind a barrier.
    """
    tl.debug_barrier()
    return (tl.load(counter) - epoch + 2).to(tl.float32)


@triton.jit
def _sum_of(
    spaces, offset, hidden, at, inside, counter, epoch, RANKS: tl.constexpr, ADD: tl.constexpr
):
    """Return the sum of the parts of all ranks, rounded once."""
    dtype: tl.constexpr = hidden.dtype.element_ty
    parts = ()
    for peer in tl.static_range(RANKS):
        part = tl.load(_rows_at(spaces[peer], offset, dtype) + at, mask=inside, other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    if ADD:
        part = tl.load(hidden + at, mask=inside, other=0.0)
        parts = parts + (part,)  # type: ignore[assignment]
    one = _one(counter, epoch)
    total = parts[0].to(tl.float32) * one  # type: ignore[misc]
    for index in tl.static_range(1, RANKS + ADD):
        total += parts[index].to(tl.float32) * one
    return total.to(dtype)


@triton.jit
def _write(value, hidden, normed, w, at, inside, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Write a row of the stream, and of its norm, as in kernels/triton/rms_norm_triton.py."""
    tl.store(hidden + at, value, mask=inside)
    if NORM:
        dtype: tl.constexpr = hidden.dtype.element_ty
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        tl.store(normed + at, ((wide * scale).to(dtype).to(tl.float32) * w).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["T", "rank"])
def _one_shot(
    spaces,
    counters,
    hidden,
    weight,
    normed,
    T,
    rank,
    offset,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch = tl.load(counters + program) + 1
    _meet(spaces, rank, epoch, RANKS)
    for row in range(program, T, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * D + columns
        value = _sum_of(spaces, offset, hidden, at, inside, counters + program, epoch, RANKS, ADD)
        _write(value, hidden, normed, w, at, inside, eps, D, NORM)
    tl.store(counters + program, epoch)


@triton.jit(do_not_specialize=["T", "rank"])
def _two_shot(
    spaces,
    counters,
    hidden,
    weight,
    normed,
    T,
    rank,
    offset,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum row i on rank i % RANKS; the program of the same index reads it on the other ranks."""
    dtype: tl.constexpr = hidden.dtype.element_ty
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    epoch = tl.load(counters + program) + 1
    _meet(spaces, rank, epoch, RANKS)
    own = _rows_at(space_of(spaces, rank, RANKS), offset, dtype)
    for first in range(program * RANKS, T, tl.num_programs(0) * RANKS):
        row = first + rank
        if row < T:
            at = tl.cast(row, tl.int64) * D + columns
            value = _sum_of(
                spaces, offset, hidden, at, inside, counters + program, epoch, RANKS, ADD
            )
            tl.store(own + at, value, mask=inside)
            _write(value, hidden, normed, w, at, inside, eps, D, NORM)
    _meet(spaces, rank, epoch + 1, RANKS)
    end = tl.cast(T, tl.int64) * D
    for first in range(program * RANKS, T, tl.num_programs(0) * RANKS):
        values = ()
        for turn in tl.static_range(1, RANKS):
            # Each rank begins with a different rank.
            peer = (rank + turn) % RANKS
            at = tl.cast(first + peer, tl.int64) * D + columns
            value = tl.load(
                _rows_at(space_of(spaces, peer, RANKS), offset, dtype) + at,
                mask=inside & (at < end),
                other=0.0,
            )
            values = values + (value,)  # type: ignore[assignment]
        one = _one(counters + program, epoch)
        for turn in tl.static_range(1, RANKS):
            row = first + (rank + turn) % RANKS
            if row < T:
                value = (values[turn - 1].to(tl.float32) * one).to(dtype)
                _write(
                    value,
                    hidden,
                    normed,
                    w,
                    tl.cast(row, tl.int64) * D + columns,
                    inside,
                    eps,
                    D,
                    NORM,
                )
    tl.store(counters + program, epoch + 1)


_KERNELS: dict[Kind, Any] = {"pushed": _pushed, "one_shot": _one_shot, "two_shot": _two_shot}


def sum_parts(
    memory: PeerMemory,
    buffer: int,
    hidden: Tensor,
    norm: RmsNorm | None,
    config: SumConfig,
    *,
    add: bool,
) -> Tensor | None:
    """Write the sum of all ranks' parts in this buffer to hidden, and return its norm [T, D].

    hidden is [T, D], contiguous and of the parts' type. With `add`, hidden is a part too, which
    must be the same on all ranks. The result is None without a norm.

    All ranks call this with the same arguments, in the same order. The rule in the module's
    docstring says which buffer may be used.
    """
    rows, width = hidden.shape
    assert hidden.is_contiguous() and rows * width * hidden.element_size() <= memory.buffer_bytes, (
        f"{hidden.shape}"
    )
    ranks = len(memory.addresses)
    normed = hidden if norm is None else torch.empty_like(hidden)
    block = next_power_of_2(width)
    kernel, most = _KERNELS[config.kind], rows
    areas: tuple[int, ...] = ()
    if config.kind == "two_shot":
        most = cdiv(rows, ranks)
    elif config.kind == "pushed":
        assert can_push(ranks, rows, width * hidden.element_size()), f"{hidden.shape} among {ranks}"
        areas = (memory.offset(NUM_BUFFERS), memory.area_bytes)
    kernel[(min(most, config.programs, memory.programs),)](
        memory.addresses,
        memory.counters,
        hidden,
        hidden if norm is None else norm.weight,
        normed,
        rows,
        memory.rank,
        memory.offset(buffer),
        0.0 if norm is None else norm.eps,
        *areas,
        width,
        block,
        ranks,
        add,
        norm is not None,
        num_warps=max(1, min(16, block // 256)),
        **pdl(hidden),
    )
    return None if norm is None else normed
