"""How long ranks take to sum rows of a bf16 stream, by size: NCCL, and the kernels of
kernels.all_reduce_triton, alone and ending in the addition to the residual stream and in the norm.

    python benchmarks/kernels/all_reduce.py --gpus 2 4 8 [--write kernels/sums/tuned_all_reduce.py]

Microseconds in a CUDA graph of 20, the slowest rank's, the best of some numbers of programs. NCCL's
sum is followed by the norm's own kernel in its second column, as where the engine uses it; its
addition is the product's. --write: what the engine chooses by.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.kernels.ops.rms_norm import RmsNorm
from sidestep.kernels.sums.all_reduce_triton import Kind, SumConfig, sum_parts
from sidestep.kernels.sums.peer_memory_triton import PeerMemory
from sidestep.kernels.sums.pushed_sum_triton import can_push
from sidestep.kernels.sums.tuned_all_reduce import SUMS, Entry

SIZES = [1 << n for n in range(12, 25)]
PROGRAMS = (16, 32, 64, 128)
KINDS: tuple[Kind, ...] = ("pushed", "one_shot", "two_shot")
WIDTH, DTYPE = 4096, torch.bfloat16
CALLS, REPLAYS = 20, 15

Row = dict[str, float]
"""Microseconds by what was timed: 'nccl', 'nccl norm', or '<kind> <programs>' and the same with '
norm', of kinds that take such parts."""


def shape(num_bytes: int) -> tuple[int, int]:
    """Rows and width of a part."""
    width = min(WIDTH, num_bytes // DTYPE.itemsize)
    return num_bytes // (width * DTYPE.itemsize), width


class Rank:
    """One process, one GPU."""

    def __init__(self, rank: int, ranks: int, meet: str) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.parallel = Parallel(rank, ranks, rendezvous=meet, cuda=True)
        memory = self.parallel.open_peer_memory(SIZES[-1], WIDTH, DTYPE, self.device)
        if memory is None:
            raise SystemExit("these GPUs cannot read one another's memory")
        self.memory: PeerMemory = memory

    def microseconds(self, call: Callable[[int], object]) -> float:
        """Of one call among many; the slowest rank's. call: gets the number of the place that is
        free.
        """
        for place in (0, 1):
            call(place)
        torch.cuda.synchronize()
        self.parallel.minimum(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(
                CALLS
            ):  # an even number of them, so that places take turns between replays too
                call(number % 2)
        times = []
        for _ in range(REPLAYS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.parallel.minimum(0)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / CALLS)
        return -self.parallel.minimum(-int(statistics.median(times[3:]) * 1e3)) / 1e3

    def measure(self, num_bytes: int) -> Row:
        rows, width = shape(num_bytes)
        x = torch.zeros(rows, width, dtype=DTYPE, device=self.device)  # which sums leave as it is
        norm = RmsNorm(torch.ones(width, dtype=DTYPE, device=self.device), 1e-6)
        row = {
            "nccl": self.microseconds(lambda place: self.parallel.all_reduce(x)),
            "nccl norm": self.microseconds(lambda place: norm(self.parallel.all_reduce(x))),
        }
        hidden = torch.zeros_like(x)
        for kind in KINDS:
            if kind == "pushed" and not can_push(self.parallel.size, rows, width * DTYPE.itemsize):
                continue
            for programs in PROGRAMS:
                config = SumConfig(kind, programs)
                for name, then in ((f"{kind} {programs}", None), (f"{kind} {programs} norm", norm)):
                    for place in (0, 1):
                        self.memory.part(place, rows, width, DTYPE).zero_()
                    self.parallel.minimum(0)

                    def call(
                        place: int, config: SumConfig = config, then: RmsNorm | None = then
                    ) -> object:
                        return sum_parts(
                            self.memory, place, hidden, then, config, add=then is not None
                        )

                    row[name] = self.microseconds(call)
        return row


def best(row: Row, kind: Kind, ending: str) -> tuple[float, int]:
    """The least time of a kernel, and its programs; infinite where it takes no such parts."""
    return min((row.get(f"{kind} {programs}{ending}", math.inf), programs) for programs in PROGRAMS)


def entries_of(rows: dict[int, Row]) -> list[Entry]:
    """What to choose by size: the best kernel, up to the largest size at which one is faster than
    NCCL and the norm.
    """
    entries: list[Entry] = []
    last = max(
        (
            size
            for size, row in rows.items()
            if min(best(row, kind, " norm")[0] for kind in KINDS) < row["nccl norm"]
        ),
        default=0,
    )
    for size in sorted(size for size in rows if size <= last):
        _, programs, kind = min((*best(rows[size], kind, " norm"), kind) for kind in KINDS)
        if entries and entries[-1][1:] == (kind, programs):
            entries.pop()
        entries.append((size, kind, programs))
    return entries


def table_text(
    measured: dict[int, list[Entry]], before: Mapping[int, Sequence[Entry]], device: str
) -> str:
    """The file that --write writes. before: the table so far, of which what was not measured now is
    kept.
    """
    lines = []
    for ranks in sorted({*measured, *before}):
        entries = "".join(
            f'\n        ({size}, "{kind}", {programs}),'
            for size, kind, programs in measured.get(ranks, before.get(ranks, ()))
        )
        kept = "" if ranks in measured else "  # not measured on it"
        lines.append(f"    {ranks}: ({kept}{entries}),\n")
    return f'''"""Generated by benchmarks/kernels/all_reduce.py --write; do not edit. Measured on {device}.

Number of ranks: up to how many bytes of a part, in rising order, which kernel of
kernels.all_reduce_triton with how many programs at most. Beyond the last torch.distributed (NCCL)
is faster.
"""

from __future__ import annotations

from typing import Literal

Entry = tuple[int, Literal["pushed", "one_shot", "two_shot"], int]

SUMS: dict[int, tuple[Entry, ...]] = {{
{"".join(lines)}}}
'''


def size_name(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >> 20 else f"{num_bytes >> 10} KB"


def print_table(ranks: int, rows: dict[int, Row]) -> None:
    print(
        f"\n{ranks} GPUs, us:\n\n| bytes | NCCL | NCCL, norm | pushed | with residual and norm | one shot | with "
        "residual and norm | two shots | with residual and norm |\n|---|---|---|---|---|---|---|---|---|"
    )
    for size, row in rows.items():
        cells = [row["nccl"], row["nccl norm"]]
        cells += [best(row, kind, ending)[0] for kind in KINDS for ending in ("", " norm")]
        printed = [f"{cell:.1f}" if math.isfinite(cell) else "" for cell in cells]
        print(f"| {size_name(size)} | " + " | ".join(printed) + " |")


def run_rank(rank: int, ranks: int, meet: str) -> None:
    """Prints a line of JSON a size, on rank 0."""
    process = Rank(rank, ranks, meet)
    for size in SIZES:
        row = process.measure(size)
        if rank == 0:
            assert all(math.isfinite(value) for value in row.values())
            print(json.dumps([size, row]), flush=True)


def run_ranks(ranks: int) -> dict[int, Row]:
    """Starts a process a GPU. Raises RuntimeError if one of them fails."""
    rows: dict[int, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes: list[subprocess.Popen[str]] = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--rank",
                    str(rank),
                    "--gpus",
                    str(ranks),
                    "--meet",
                    f"{folder}/meet",
                ],
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                if line.startswith("["):
                    size, row = json.loads(line)
                    rows[size] = row
            if any(process.wait(60) for process in processes) or len(rows) < len(SIZES):
                raise RuntimeError(f"a rank of {ranks} failed")
        finally:
            for process in processes:
                process.kill()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--write", type=Path, help="writes the table to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank is not None:
        run_rank(args.rank, args.gpus[0], args.meet)
        return
    table = {}
    for ranks in args.gpus:
        if ranks > torch.cuda.device_count():
            print(f"{ranks} GPUs: there are {torch.cuda.device_count()}")
            continue
        rows = run_ranks(ranks)
        print_table(ranks, rows)
        table[ranks] = entries_of(rows)
        print(f"chosen: {table[ranks]}")
    if args.write:
        args.write.write_text(table_text(table, SUMS, torch.cuda.get_device_name()))


if __name__ == "__main__":
    main()
