"""All-reduce of small parts: each rank pushes its part to the others, in words that carry a mark.

The kernels in kernels/sums/all_reduce_triton.py have a barrier first and read then. That costs a
fence over the whole system, a flag's way to the other GPU, and a part's way there and back. Here a
part goes one way, in *words* of 8 bytes: 4 of data, then 4 of a mark that belongs to this sum. An
aligned word is written and read whole, so a word with the mark has the data, without a flag or a
fence. It costs twice the bytes, in an area that each rank has in each other's space
(kernels/sums/peer_memory_triton.py). NCCL calls its protocol of this kind LL.

**A word with the mark belongs to this sum.** The mark is the low half of a count of pushed sums,
which is the same on all ranks and in all programs: each program of a sum writes its share of all
counters. So a mark does not come back before 2^32 sums, whatever the number of rows, their width or
the number of programs. It is never zero, the value of memory that no rank has written. After 2^32
sums, which take a day or two, a word can be taken for another sum's. That needs a word last written
exactly a multiple of 2^32 sums before, by a sum larger than all since.

**No word is overwritten too early.** Areas alternate with the count. A rank that pushes sum n + 2
has ended n + 1, for which it needed words of every other rank. They pushed those words in n + 1,
behind `gdc_wait`, so they had ended n and read all of it. Other sums in between make no difference,
of any kind and size, nor does a graph's replay: the count is on the device.

**Buffers.** Only this rank reads its own part, in its buffer. The rule for buffers in
kernels/sums/all_reduce_triton.py holds when its sums and these alternate: a rank that has ended a
sum knows from all others that they had begun it.

**No deadlock.** A program pushes all its rows before it waits for any, and waits only for the
program of the same index on the other ranks. As there, all programs fit on the device at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sidestep.kernels.launch import next_power_of_2
from sidestep.kernels.sums.peer_memory_triton import MAX_PROGRAMS, MOST_PUSHED_BYTES, space_of

_MAX_PROGRAMS = tl.constexpr(MAX_PROGRAMS)
_MOST_POLLED_BYTES = 1 << 17
"""Largest size of one row's words of all ranks, in bytes, which a program has in registers at once.

It is half of the registers. The program also holds the row itself, which counts where ranks are
few.
"""


def can_push(ranks: int, rows: int, row_bytes: int) -> bool:
    """Return whether the kernel takes parts of this size."""
    return (
        row_bytes % 4 == 0
        and rows * row_bytes <= MOST_PUSHED_BYTES
        and 2 * max(ranks, 4) * next_power_of_2(row_bytes) <= _MOST_POLLED_BYTES
    )


@triton.jit
def _row_at(address, row, W: tl.constexpr):
    """Return a pointer to a row as words of data.

    Its declared alignment is never more than that of two words. A thread then has two of them, as
    it has two words of 8 bytes, and threads need not exchange any.
    """
    begin = tl.cast(address, tl.int64) + row * (4 * W)
    return tl.multiple_of(begin.to(tl.pointer_type(tl.int32)), 4 if W % 2 else 8)


@triton.jit
def _marked(data, mark):
    return data.to(tl.uint32, bitcast=True).to(tl.int64) | mark


@triton.jit
def _values(data, dtype: tl.constexpr):
    """Return the two values in words of data, in float32, the one of lower address first.

    In a word of 32-bit data the second is zero.
    """
    if dtype.primitive_bitwidth == 32:
        return data.to(dtype, bitcast=True).to(tl.float32), tl.zeros_like(data).to(tl.float32)
    else:
        low, high = data.to(tl.int16), (data >> 16).to(tl.int16)
        return low.to(dtype, bitcast=True).to(tl.float32), high.to(dtype, bitcast=True).to(
            tl.float32
        )


@triton.jit
def _rounded(low, high, dtype: tl.constexpr):
    """Return such values as words of data, rounded to dtype."""
    if dtype.primitive_bitwidth == 32:
        return low.to(dtype).to(tl.int32, bitcast=True)
    else:
        low = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return (low | (high << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _area(space, areas, source, AREA: tl.constexpr):
    """Return a pointer to a rank's words in a space."""
    return tl.multiple_of((space + areas).to(tl.pointer_type(tl.int64)), 16) + source * (AREA // 8)


@triton.jit
def _push(spaces, rank, words, areas, at, inside, AREA: tl.constexpr, RANKS: tl.constexpr):
    """Push a row's words to all other ranks."""
    for turn in tl.static_range(1, RANKS):
        # Each rank begins with a different rank.
        space = space_of(spaces, (rank + turn) % RANKS, RANKS)
        # Written through to memory.
        tl.store(_area(space, areas, rank, AREA) + at, words, mask=inside, cache_modifier=".wt")


@triton.jit
def _poll(space, rank, own, areas, at, inside, AREA: tl.constexpr, RANKS: tl.constexpr):
    """Read a row's words of all ranks as they are now; this rank's own words are given."""
    words = ()
    me = tl.zeros_like(at) + rank
    for peer in tl.static_range(RANKS):
        there = inside & (me != peer)
        word = tl.load(_area(space, areas, peer, AREA) + at, mask=there, other=own, volatile=True)
        words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def _missing(words, mark, RANKS: tl.constexpr):
    """Return whether any word is not this sum's, as one number for the whole program."""
    wrong = words[0] ^ mark
    for peer in tl.static_range(1, RANKS):
        wrong |= words[peer] ^ mark
    return tl.max(((wrong >> 32) != 0).to(tl.int32), 0)


@triton.jit
def _receive(space, rank, own, areas, at, inside, mark, AREA: tl.constexpr, RANKS: tl.constexpr):
    """Return a row's words of all ranks once they have all arrived."""
    words = _poll(space, rank, own, areas, at, inside, AREA, RANKS)
    missing = _missing(words, mark, RANKS)
    while missing != 0:
        words = _poll(space, rank, own, areas, at, inside, AREA, RANKS)
        missing = _missing(words, mark, RANKS)
    return words


@triton.jit
def _sum_of(words, before, dtype: tl.constexpr, RANKS: tl.constexpr, ADD: tl.constexpr):
    """Return the ranks' parts, in their order, plus the stream, as words of data rounded once."""
    low, high = _values(words[0].to(tl.int32), dtype)
    for peer in tl.static_range(1, RANKS):
        next_low, next_high = _values(words[peer].to(tl.int32), dtype)
        low += next_low
        high += next_high
    if ADD:
        next_low, next_high = _values(before, dtype)
        low += next_low
        high += next_high
    return _rounded(low, high, dtype)


@triton.jit
def _normed(data, w, eps, dtype: tl.constexpr, D: tl.constexpr):
    """Return a row's norm, computed as in kernels/triton/rms_norm_triton.py."""
    low, high = _values(data, dtype)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / D + eps)
    low, high = _values(_rounded(low * scale, high * scale, dtype), dtype)
    w_low, w_high = _values(w, dtype)
    return _rounded(low * w_low, high * w_high, dtype)


@triton.jit(do_not_specialize=["T", "rank"], do_not_specialize_on_alignment=["weight"])
def _pushed(
    spaces,
    counters,
    hidden,
    weight,
    normed,
    T,
    rank,
    offset,
    eps,
    areas,
    AREA: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push this rank's rows, then sum the rows of all ranks.

    areas: offset of the first area in a space, in bytes. AREA: bytes of one area.
    """
    dtype: tl.constexpr = hidden.dtype.element_ty
    PER: tl.constexpr = 32 // dtype.primitive_bitwidth
    W: tl.constexpr = D // PER
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK // PER)
    inside = columns < W
    w = tl.load(_row_at(weight, 0, W) + columns, mask=inside, other=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    space = space_of(spaces, rank, RANKS)
    count = tl.load(counters + _MAX_PROGRAMS + program) + 1
    mark = count << 32
    areas += (count & 1) * RANKS * AREA
    for row in range(program, T, tl.num_programs(0)):
        data = tl.load(_row_at(space + offset, row, W) + columns, mask=inside, other=0)
        _push(spaces, rank, _marked(data, mark), areas, row * W + columns, inside, AREA, RANKS)
    for row in range(program, T, tl.num_programs(0)):
        data = tl.load(_row_at(space + offset, row, W) + columns, mask=inside, other=0)
        stream = _row_at(hidden, row, W) + columns
        before = tl.load(stream, mask=inside & ADD, other=0)
        words = _receive(
            space, rank, _marked(data, mark), areas, row * W + columns, inside, mark, AREA, RANKS
        )
        data = _sum_of(words, before, dtype, RANKS, ADD)
        tl.store(stream, data, mask=inside)
        if NORM:
            tl.store(
                _row_at(normed, row, W) + columns, _normed(data, w, eps, dtype, D), mask=inside
            )
    share = program + tl.arange(0, _MAX_PROGRAMS) * tl.num_programs(0)
    # The next sum's mark is not zero, and the next sum uses the other turn's areas.
    told = tl.where((count + 1) << 32 == 0, count + 2, count)
    tl.store(
        counters + _MAX_PROGRAMS + share, told + tl.zeros_like(share), mask=share < _MAX_PROGRAMS
    )
