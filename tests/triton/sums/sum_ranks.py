"""Ranks that sum through one another's memory, in Triton's interpreter.

`python -m tests.triton.sums.sum_ranks RANKS sums|model`: sums of all kinds, or a small model of
several layers.

Each rank is a process, and the spaces are memory that all of them share, so flags and parts really
pass between them. In most sums one rank is as slow as possible. Either it comes last, or it reads
only when all others are at the next sum, with their next parts written. Nothing sleeps: a slow rank
waits for the others' flags, or for the words that they push.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from sidestep.executor.layers.linear import Linear
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import PeerSums, try_sums
from sidestep.executor.weights.weight_loader import DummyWeights
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.sums import all_reduce_triton, pushed_sum_triton
from sidestep.kernels.sums.all_reduce_triton import Kind, SumConfig, sum_parts
from sidestep.kernels.sums.peer_memory_triton import (
    MAX_PROGRAMS,
    NUM_BUFFERS,
    NUM_COUNTERS,
    PeerMemory,
    space_bytes,
)
from sidestep.kernels.sums.pushed_sum_triton import can_push
from sidestep.kernels.sums.tuned_all_reduce import SUMS
from tests.fakes import make_spec
from tests.triton.support import (
    PoisonedAllocations,
    Values,
    assert_close,
    assert_margins_untouched,
    guarded,
    same,
    unchanged,
)

PLACE_BYTES = 1 << 14
SHAPES = [(1, 1), (5, 33), (1, 130), (9, 16), (2, 257), (7, 96), (3, 48)]
TURNS = [0, 1, 2, 1, 2, 1, 2]
"""Indices of the memory's parts, as a model of three layers takes them."""
KINDS: list[Kind] = [
    "pushed",
    "pushed",
    "two_shot",
    "two_shot",
    "one_shot",
    "pushed",
    "one_shot",
    "one_shot",
    "two_shot",
    "pushed",
]
"""Kinds of sums, such that each kind follows each."""
FIRST_COUNT = (1 << 32) - 10
"""Count at which pushed sums start: their marks begin again in between."""
EPS = 1e-6


@dataclass(frozen=True)
class Sum:
    """One of the sums that the ranks do one after the other, and its slow rank."""

    number: int
    rows: int
    width: int
    dtype: torch.dtype
    place: int
    config: SumConfig
    add: bool
    norm: bool
    late: int | None
    """The rank that comes last."""
    reads_late: int | None
    """The rank that reads when all others are at the next sum already."""
    next_kind: Kind


def plan(ranks: int) -> Iterator[Sum]:
    """Plan every kind of sum with every kind of slowness, by every rank.

    Each is followed by sums of every kind.
    """
    count = 5 * len(SHAPES)
    for n in range(count):
        rows, width, dtype, kind = sum_of(ranks, n)
        slow, way = n // 3 % ranks, n % 3
        yield Sum(
            n,
            rows,
            width,
            dtype,
            TURNS[n % len(TURNS)],
            SumConfig(kind, 1 + n // 5 % 3),
            add=n % 5 != 0,
            norm=n % 7 != 3,
            late=slow if way == 1 else None,
            reads_late=slow if way == 2 and n + 1 < count else None,
            next_kind=sum_of(ranks, n + 1)[3],
        )


def sum_of(ranks: int, n: int) -> tuple[int, int, torch.dtype, Kind]:
    """Return rows, width and type of the n-th sum, and its kernel."""
    rows, width = SHAPES[n % len(SHAPES)]
    dtype, kind = (torch.float32, torch.float16)[n // 2 % 2], KINDS[n % len(KINDS)]
    if kind == "pushed" and not can_push(ranks, rows, width * dtype.itemsize):
        kind = "one_shot"
    return rows, width, dtype, kind


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, rank: int, spaces: list[Tensor]) -> None:
        self.rank = rank
        self.num_ranks = len(spaces)
        self.memory = PeerMemory(
            rank,
            tuple(space.data_ptr() for space in spaces),
            spaces[rank],
            torch.zeros(NUM_COUNTERS, dtype=torch.int64),
            PLACE_BYTES,
            programs=3,
        )
        self.memory.counters[MAX_PROGRAMS:] = FIRST_COUNT - 1
        self.count = FIRST_COUNT
        """Count of the next pushed sum."""
        self.flags = (
            spaces[rank][: 8 * MAX_PROGRAMS * self.num_ranks]
            .view(torch.int64)
            .view(MAX_PROGRAMS, -1)
        )
        self.digest = 0
        self._meet = all_reduce_triton._meet
        all_reduce_triton._meet = self.meet
        self._push, self._receive = pushed_sum_triton._push, pushed_sum_triton._receive
        pushed_sum_triton._push, pushed_sum_triton._receive = self.push, self.receive

    def wait_for(self, program: int, epoch: int) -> None:
        """Wait until the flags of all others have reached this value."""
        while any(
            int(self.flags[program, other]) < epoch
            for other in range(self.num_ranks)
            if other != self.rank
        ):
            os.sched_yield()

    def wait_for_words(self, count: int, first: int) -> None:
        """Wait until all others have pushed the word of this number in the sum of this count."""
        offset, size = self.memory.offset(NUM_BUFFERS), self.memory.area_bytes
        areas = (
            self.memory.own[offset:]
            .view(torch.int64)
            .view(-1, self.num_ranks, size // 8)[count % 2]
        )
        while any(
            int(areas[other, first]) >> 32 & 0xFFFFFFFF != count & 0xFFFFFFFF
            for other in range(self.num_ranks)
            if other != self.rank
        ):
            os.sched_yield()

    def wait_for_next(self) -> None:
        """Wait until all others are at the next sum."""
        if self.current.next_kind == "pushed":
            self.wait_for_words(self.count, 0)
        else:
            self.wait_for(0, int(self.flags[0, self.rank]) + 1)

    def push(self, spaces: Any, rank: Any, words: Any, areas: Any, at: Any, *sizes: Any) -> None:
        """Replace the kernel's own function: before it a rank may be late."""
        if self.current.late == self.rank:
            self.wait_for_words(self.current_count, int(at.handle.data[0]))
        self._push(spaces, rank, words, areas, at, *sizes)

    def receive(self, space: Any, rank: Any, own: Any, areas: Any, at: Any, *sizes: Any) -> Any:
        """Replace the kernel's own function.

        Before it a rank may wait until its words might be overwritten.
        """
        if (
            self.current.reads_late == self.rank
            and interpreter_builder.grid_idx[0] == interpreter_builder.grid_dim[0] - 1
        ):
            self.wait_for_next()
        return self._receive(space, rank, own, areas, at, *sizes)

    def meet(self, spaces: Any, rank: Any, epoch: Any, RANKS: Any) -> None:
        """Replace the kernels' own function.

        Before it a rank may be late, and after it slow to read.
        """
        program, now = interpreter_builder.grid_idx[0], int(epoch.handle.data.item())
        if self.current.late == self.rank:
            self.wait_for(program, now)
        self._meet(spaces, rank, epoch, RANKS)
        self._meetings += 1
        # The interpreter runs programs one after the other: only in the last one can all others be
        # at the next sum.
        if self.current.reads_late == self.rank and program == interpreter_builder.grid_dim[0] - 1:
            first_of_two = self.current.config.kind == "two_shot" and self._meetings % 2
            if first_of_two:
                self.wait_for(program, now + 1)
            else:
                self.wait_for_next()

    def run(self, s: Sum) -> None:
        self.current, self._meetings = s, 0
        if s.config.kind == "pushed":
            self.current_count = self.count
            # No mark is zero, and turns alternate.
            self.count += 3 if (self.count + 1) % (1 << 32) == 0 else 1
        values = Values(s.number)
        parts = [values.normal(s.rows, s.width, dtype=s.dtype) for _ in range(self.num_ranks)]
        before = values.normal(s.rows, s.width, dtype=s.dtype)
        weight = guarded(values.normal(s.width, dtype=s.dtype))
        # The memory behind the part is NaN, and stays so.
        offset = self.memory.offset(s.place)
        place = self.memory.own[offset : offset + PLACE_BYTES].view(s.dtype)
        place.fill_(torch.nan)
        part = self.memory.part(s.place, s.rows, s.width, s.dtype)
        part.copy_(parts[self.rank])
        hidden = guarded(before if s.add else torch.full_like(before, torch.nan))
        with unchanged(weight=weight), PoisonedAllocations():
            normed = sum_parts(
                self.memory,
                s.place,
                hidden,
                RmsNorm(weight, EPS) if s.norm else None,
                s.config,
                add=s.add,
            )
        assert_margins_untouched(hidden)
        assert bool((self.memory.counters[MAX_PROGRAMS:] + 1 == self.count).all()), (
            "programs count differently"
        )
        assert place[part.numel() :].isnan().all(), "wrote behind its part"
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        expected = (total + before.float() if s.add else total).to(s.dtype)
        assert same(hidden, expected), f"rank {self.rank}, {s}"
        start = torch.zeros((), dtype=torch.float64)
        exact = sum((p.double() for p in parts), start) + (before.double() if s.add else 0)
        assert_close(hidden, exact)
        self.digest = zlib.crc32(hidden.numpy().tobytes(), self.digest)
        if s.norm:
            wide = hidden.double()
            assert normed is not None
            assert_close(
                normed, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
            )
            self.digest = zlib.crc32(normed.numpy().tobytes(), self.digest)
        else:
            assert normed is None


class Attention:
    """A stand-in for an attention backend: it returns each token's queries."""

    def __init__(self, width: int) -> None:
        self._width = width

    def attend(self, layer: int, qkv: Tensor, *_: object) -> Tensor:
        return qkv[:, : self._width]


def states(rank: int, ranks: int, peers: PeerSums | None) -> Iterator[Stream]:
    """Return a model's states for batches of several sizes.

    The last layer computes all tokens or some of them.
    """
    spec = make_spec(
        2,
        {"num_heads": 4, "num_kv_heads": 2, "output_bias": True},
        {"width": 20, "bias": True},
        vocab_size=37,
        hidden_size=24,
    )
    parallel = Parallel()
    parallel.rank, parallel.size, parallel._peers = rank, ranks, peers
    model = DecoderForCausalLM(spec, DummyWeights(0, torch.float32, torch.device("cpu")), parallel)
    attention: Any = Attention(4 * attention_of(spec.layers)[0].head_dim // ranks)
    for tokens, rows in ((1, None), (7, torch.tensor([2, 6])), (1, None)):
        yield model.states(torch.arange(tokens) * 7 % 37, attention, rows)


def run_model(rank: int, spaces: list[Tensor]) -> int:
    """Check that a model whose layers sum through one another's memory equals one rank's."""
    ranks = len(spaces)
    # One row is pushed, two are summed in one shot, more in two.
    row = 24 * 4
    SUMS.update(
        {ranks: ((row, "pushed", 3), (2 * row, "one_shot", 3), (PLACE_BYTES, "two_shot", 3))}
    )
    memory = PeerMemory(
        rank,
        tuple(space.data_ptr() for space in spaces),
        spaces[rank],
        torch.zeros(NUM_COUNTERS, dtype=torch.int64),
        PLACE_BYTES,
        programs=3,
    )
    assert try_sums(memory, 24, torch.float16), "the trial at the start finds right what is right"
    product = Linear.__call__

    def call(self: Linear, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        return product(self, x) if out is None else out.copy_(product(self, x))

    setattr(Linear, "__call__", call)  # noqa: B010 (as on a GPU, where a product writes to `out`)
    digest = 0
    for got, expected in zip(
        states(rank, ranks, PeerSums(memory, 24, torch.float32)), states(0, 1, None), strict=True
    ):
        assert got.done is not None and expected.done is None
        torch.testing.assert_close(got.hidden, expected.hidden, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got.normed(), expected.normed(), rtol=1e-4, atol=1e-5)
        digest = zlib.crc32(got.normed().numpy().tobytes(), digest)
    return digest


def run_sums(rank: int, spaces: list[Tensor]) -> int:
    """Run the plan, and return a digest of this rank's results."""
    process = Rank(rank, spaces)
    for s in plan(len(spaces)):
        process.run(s)
    return process.digest


def run_rank(rank: int, spaces: list[Tensor], digests: Tensor, what: str) -> int:
    """Run one rank and return its exit status."""
    try:
        torch.set_num_threads(1)
        with torch.inference_mode():
            digests[rank] = {"sums": run_sums, "model": run_model}[what](rank, spaces)
        return 0
    except BaseException:
        traceback.print_exc()
        return 1


def _die_with_parent() -> None:
    """End this process with its parent: a rank without the others would wait for ever."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(ranks: int, what: str) -> None:
    size = space_bytes(ranks, PLACE_BYTES)
    shared = torch.frombuffer(mmap.mmap(-1, ranks * size + 8 * ranks), dtype=torch.uint8)
    spaces, digests = (
        list(shared[: ranks * size].view(ranks, size)),
        shared[ranks * size :].view(torch.int64),
    )
    children = {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            _die_with_parent()
            os._exit(run_rank(rank, spaces, digests, what))
        children[child] = rank
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"rank {rank} failed")
    assert len(set(digests.tolist())) == 1 and digests[0], "ranks have different bits"
    print(f"{what} of {ranks} ranks: the same bits")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
