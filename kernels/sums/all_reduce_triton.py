"""The sum over ranks of a row-parallel product, added to the residual stream, and the next norm:
one kernel.

Each rank has a *space*: memory of the same layout that all ranks can read and write. The product
before writes this rank's part into a *place* of its own space; a kernel here sums the parts of all
ranks. They are added in the order of the ranks, in float32, and rounded once: every rank has the
same sum to the bit, and so do all kernels:

- Pushed: each rank writes its part to all others, and nobody meets: kernels.pushed_sum_triton. For
  few rows.
- One shot: each rank reads all parts of all rows. The ranks meet once.
- Two shots: each rank sums the rows that are its own, leaves the sums in its place, and reads those
  of the others. The ranks meet twice, and each reads two parts' worth instead of as many as there
  are ranks. For many rows.

Of the last two:

**How ranks meet.** Program p of a kernel meets program p of the same kernel on the other ranks, and
nobody else. It writes its epoch into a flag in each rank's space (a flag has one writer) and waits
until its own flags have all reached it. Epochs only grow, so nothing is ever reset, a graph is
replayed as it is, and a rank that is ahead may have written a later one already. The program's last
epoch is in this rank's `counters`, on the device.

**Why what is read is there.** A part was written by a kernel before this one on the same stream,
or, in the second shot, by threads that a barrier puts before the flag. The flag is written with
release and read with acquire semantics at system scope, and a barrier puts the other threads' reads
after it. `gdc_wait` comes before all of this.

**Why nothing is overwritten too early.** A rank that has ended sum n has met all others in it. They
had begun sum n then, so they had ended sum n - 1: kernels of a stream end in order, and `gdc_wait`
comes before the flags. So whoever has ended sum n may write any part but that of sum n itself,
which others may still be reading. Hence the rule that callers keep: **two sums, one after the other
on the device, never use the same place.** In the second shot a rank writes only rows of its place
that nobody else has read before.

**Why it does not hang, if all ranks launch the same sums.** All of a kernel's programs fit on the
device at once, one a processor. What runs beside them ends by itself, and a kernel that is started
early (programmatic dependent launch) starts only after all programs of this one have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.sums.peer_memory_triton import PLACES, PeerMemory, aligned, space_of
from sidestep.kernels.sums.pushed_sum_triton import _pushed, can_push
from sidestep.kernels.sums.tuned_all_reduce import SUMS

Kind = Literal["pushed", "one_shot", "two_shot"]


@dataclass(frozen=True)
class SumConfig:
    """Which kernel, and how many programs at most."""

    kind: Kind
    programs: int


def choose(ranks: int, rows: int, row_bytes: int) -> SumConfig | None:
    """What is fastest for parts of this size: as tuned, for the next larger number of ranks that is
    known, among the kernels that take such rows; None: what torch.distributed has.
    """
    known = next((n for n in sorted(SUMS) if n >= ranks), None)
    for size, kind, programs in () if known is None else SUMS[known]:
        if rows * row_bytes <= size and (kind != "pushed" or can_push(ranks, rows, row_bytes)):
            return SumConfig(kind, programs)
    return None


def most_place_bytes(ranks: int, num_bytes: int) -> int:
    """Size of a place for parts of up to so many bytes; 0 where `choose` has no kernel."""
    known = next((n for n in sorted(SUMS) if n >= ranks), None)
    most = 0 if known is None or not SUMS[known] else SUMS[known][-1][0]
    return aligned(min(most, num_bytes))


@triton.jit
def _meet(spaces, rank, epoch, RANKS: tl.constexpr):
    """Waits until all ranks have come to this epoch of this program."""
    peer = tl.arange(0, triton.next_power_of_2(RANKS))
    there = peer < RANKS
    flags = tl.program_id(0) * RANKS
    theirs = space_of(spaces, peer, RANKS).to(tl.pointer_type(tl.int64)) + (flags + rank)
    tl.debug_barrier()
    tl.atomic_xchg(theirs, epoch, mask=there, sem="release", scope="sys")
    own = space_of(spaces, rank, RANKS).to(tl.pointer_type(tl.int64)) + (flags + peer)
    # What goes round is a scalar: Triton 3.6 does not compile a tensor there.
    least = epoch - 1
    while least < epoch:
        seen = tl.atomic_add(
            own, tl.zeros_like(peer).to(tl.int64), mask=there, sem="acquire", scope="sys"
        )
        least = tl.min(tl.where(there, seen, epoch), 0)
    tl.debug_barrier()


@triton.jit
def _rows_at(address, offset, dtype: tl.constexpr):
    """The rows at a place of a space."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _one(counter, epoch):
    """A factor for what was loaded before. All loads are to be on their way before one is waited
    for; the assembler would rather save registers and take turns, each of them a way to another GPU
    and back. But it cannot multiply before it has this, which comes from behind a barrier.
    """
    tl.debug_barrier()
    return (tl.load(counter) - epoch + 2).to(tl.float32)


@triton.jit
def _sum_of(
    spaces, offset, hidden, at, inside, counter, epoch, RANKS: tl.constexpr, ADD: tl.constexpr
):
    """The parts of all ranks, rounded once."""
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
    """A row of the stream, and of its norm (as kernels.rms_norm_triton has it)."""
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
    """Row i is rank i % RANKS's; the same program sums it there and reads it elsewhere."""
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
            # Each rank begins with another one.
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
    place: int,
    hidden: Tensor,
    norm: RmsNorm | None,
    config: SumConfig,
    *,
    add: bool,
) -> Tensor | None:
    """Writes the sum of the parts at this place of all ranks to hidden [T, D], contiguous and of
    the parts' type; with `add`, hidden is a part too, which must be the same on all ranks. Returns
    the norm of that, [T, D].

    All ranks call this with the same arguments, in the same order; which place may be used, the
    file's top says.
    """
    rows, width = hidden.shape
    assert hidden.is_contiguous() and rows * width * hidden.element_size() <= memory.place_bytes, (
        f"{hidden.shape}"
    )
    ranks = len(memory.addresses)
    normed = hidden if norm is None else torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    kernel, most = _KERNELS[config.kind], rows
    areas: tuple[int, ...] = ()
    if config.kind == "two_shot":
        most = triton.cdiv(rows, ranks)
    elif config.kind == "pushed":
        assert can_push(ranks, rows, width * hidden.element_size()), f"{hidden.shape} among {ranks}"
        areas = (memory.offset(PLACES), memory.area_bytes)
    kernel[(min(most, config.programs, memory.programs),)](
        memory.addresses,
        memory.counters,
        hidden,
        hidden if norm is None else norm.weight,
        normed,
        rows,
        memory.rank,
        memory.offset(place),
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
