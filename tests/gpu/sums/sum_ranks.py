"""Child of test_all_reduce: one rank on one GPU.

Arguments: rank, ranks, rendezvous file, type. Prints a digest.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.sums.all_reduce_triton import Kind, SumConfig, sum_parts
from sidestep.kernels.sums.peer_memory_triton import PeerMemory
from sidestep.kernels.sums.pushed_sum_triton import can_push
from tests.triton.support import Values, assert_close

PLACE_BYTES = 1 << 23
SHAPES = [(1, 4096), (21, 1000), (64, 1024), (257, 1000), (300, 4096)]
KINDS: list[tuple[Kind, ...]] = [
    ("pushed",),
    ("one_shot",),
    ("two_shot",),
    ("pushed", "one_shot", "pushed", "two_shot"),
]
"""Kinds that the sums of a graph take in turn; each item is one graph."""
SUMS_OF_A_GRAPH, REPLAYS = 7, 1000
EPS = 1e-6


class Rank:
    """One rank, in a process of its own."""

    def __init__(self, rank: int, ranks: int, meet: str, dtype: torch.dtype) -> None:
        self.rank, self.ranks, self.dtype = rank, ranks, dtype
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.parallel = Parallel(rank, ranks, rendezvous=meet, cuda=True)
        memory = self.parallel.open_peer_memory(PLACE_BYTES, 4096, dtype, self.device)
        assert memory is not None, "GPUs of one host can read one another's memory"
        self.memory: PeerMemory = memory

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        return graph

    def check(self, seed: int, rows: int, width: int, configs: list[SumConfig]) -> int:
        """Replay a graph in which each sum is the next one's part, as in the layers of a model.

        The number of sums is odd, so that the buffers alternate between replays too. Each replay
        begins with other values. In some replays the stream is compared with float64; the bits of
        all replays go into the digest.
        """
        values = Values(seed)

        def draw(scale: float = 1.0) -> Tensor:
            return values.normal(rows, width, dtype=self.dtype, scale=scale).to(self.device)

        given = [draw() for _ in range(self.ranks)]
        weight = values.normal(width, dtype=self.dtype).to(self.device)
        mine, step = given[self.rank], torch.zeros((), dtype=self.dtype, device=self.device)
        hidden, normed = torch.zeros_like(mine), torch.zeros_like(mine)
        kind = torch.int32 if self.dtype == torch.float32 else torch.int16
        digest = torch.zeros(rows, width, dtype=kind, device=self.device)

        def run() -> None:
            hidden.zero_()
            for number in range(SUMS_OF_A_GRAPH):
                # Buffer 0 comes first, then the others in turn: the last is not the next replay's
                # first.
                place = 0 if number == 0 else 1 + (number - 1) % 2
                torch.mul(mine, step, out=self.memory.part(place, rows, width, self.dtype))
                done = sum_parts(
                    self.memory,
                    place,
                    hidden,
                    RmsNorm(weight, EPS),
                    configs[number % len(configs)],
                    add=number > 0,
                )
                assert done is not None
                for bits in (hidden.view(kind), done.view(kind)):
                    torch.add(bits, digest, alpha=31, out=digest)  # nothing is lost: 31 is odd
            assert done is not None
            normed.copy_(done)
            step.add_(0.125).remainder_(3.0)

        run()
        graph = self.capture(run)
        step.zero_()
        digest.zero_()
        for replay in range(REPLAYS):
            if self.rank == replay // 100 % self.ranks and replay % 7 == 0:
                torch.cuda._sleep(100_000)  # this rank is late
            graph.replay()
            if replay % 250 == 3:
                factor = 0.125 * (replay % 24)
                self.compare(hidden, normed, [(g * factor).double() for g in given], weight)
        torch.cuda.synchronize()
        return zlib.crc32(digest.cpu().numpy().tobytes())

    def compare(self, hidden: Tensor, normed: Tensor, parts: list[Tensor], weight: Tensor) -> None:
        exact = torch.zeros_like(parts[0])
        for _ in range(SUMS_OF_A_GRAPH):
            exact = (exact + sum(parts)).to(self.dtype).double()
        assert_close(hidden / 32, exact / 32, ulps=8)
        wide = hidden.double()
        assert_close(
            normed,
            wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double(),
            ulps=8,
        )


def main(rank: int, ranks: int, meet: str, dtype: torch.dtype) -> None:
    process, digest = Rank(rank, ranks, meet, dtype), 0
    for seed, ((rows, width), kinds, programs) in enumerate(
        itertools.product(SHAPES, KINDS, (5, 128))
    ):
        if "pushed" in kinds and not can_push(ranks, rows, width * dtype.itemsize):
            continue
        configs = [SumConfig(kind, programs) for kind in kinds]
        digest = zlib.crc32(process.check(seed, rows, width, configs).to_bytes(4, "little"), digest)
        process.parallel.minimum(0)
    print(digest)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], getattr(torch, sys.argv[4]))
