"""Measure how long ranks take to sum rows of a bf16 stream, by size.

It compares NCCL with the kernels of kernels/sums/all_reduce_triton.py, alone and ending in the
addition to the residual stream and in the norm.

    python benchmarks/kernels/all_reduce.py --gpus 2 4 8 [--write kernels/sums/tuned_all_reduce.py]

Times are microseconds in a CUDA graph of 20 sums: the slowest rank's, the best of some numbers of
programs. In its second column, NCCL's sum is followed by the norm's own kernel, as where the engine
uses it; the product before does NCCL's addition. --write writes the table from which the engine
chooses.
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
"""Microseconds by the thing that was timed.

The keys are 'nccl', 'nccl norm', and '<kind> <programs>' with and without ' norm', for kinds that
take such parts.
"""


def shape(num_bytes: int) -> tuple[int, int]:
    """Return the rows and width of a part of num_bytes."""
    width = min(WIDTH, num_bytes // DTYPE.itemsize)
    return num_bytes // (width * DTYPE.itemsize), width


class Rank:
    """One process with one GPU."""

    def __init__(self, rank: int, ranks: int, meet: str) -> None:
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.parallel = Parallel(rank, ranks, rendezvous=meet, cuda=True)
        memory = self.parallel.open_peer_memory(SIZES[-1], WIDTH, DTYPE, self.device)
        if memory is None:
            raise SystemExit("these GPUs cannot read one another's memory")
        self.memory: PeerMemory = memory

    def microseconds(self, call: Callable[[int], object]) -> float:
        """Return the time of one call among many on the slowest rank, in microseconds.

        call: gets the index of the buffer that is free.
        """
        for buffer in (0, 1):
            call(buffer)
        torch.cuda.synchronize()
        self.parallel.minimum(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            # The number of calls is even, so that buffers alternate between replays too.
            for number in range(CALLS):
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
        """Return the times of all kernels for parts of num_bytes."""
        rows, width = shape(num_bytes)
        x = torch.zeros(rows, width, dtype=DTYPE, device=self.device)  # sums leave zeros unchanged
        norm = RmsNorm(torch.ones(width, dtype=DTYPE, device=self.device), 1e-6)
        row = {
            "nccl": self.microseconds(lambda buffer: self.parallel.all_reduce(x)),
            "nccl norm": self.microseconds(lambda buffer: norm(self.parallel.all_reduce(x))),
        }
        hidden = torch.zeros_like(x)
        for kind in KINDS:
            if kind == "pushed" and not can_push(self.parallel.size, rows, width * DTYPE.itemsize):
                continue
            for programs in PROGRAMS:
                config = SumConfig(kind, programs)
                for name, then in ((f"{kind} {programs}", None), (f"{kind} {programs} norm", norm)):
                    for buffer in (0, 1):
                        self.memory.part(buffer, rows, width, DTYPE).zero_()
                    self.parallel.minimum(0)

                    def call(
                        buffer: int, config: SumConfig = config, then: RmsNorm | None = then
                    ) -> object:
                        return sum_parts(
                            self.memory, buffer, hidden, then, config, add=then is not None
                        )

                    row[name] = self.microseconds(call)
        return row


def best(row: Row, kind: Kind, ending: str) -> tuple[float, int]:
    """Return the least time of a kernel, and its programs; infinite if it takes no such parts."""
    return min((row.get(f"{kind} {programs}{ending}", math.inf), programs) for programs in PROGRAMS)


def entries_of(rows: dict[int, Row]) -> list[Entry]:
    """Return the best kernels by size.

    The last entry is for the largest size at which a kernel is faster than NCCL and the norm.
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
    """Return the file that --write writes, without a need for `ruff format`.

    before: the table so far, of which the entries that were not measured now are kept.
    """
    lines = []
    for ranks in sorted({*measured, *before}):
        entries = "".join(
            f'\n        ({size}, "{kind}", {programs}),'
            for size, kind, programs in measured.get(ranks, before.get(ranks, ()))
        )
        kept = "" if ranks in measured else "  # not measured on it"
        lines.append(f"    {ranks}: ({kept}{entries}),\n")
    return f'''"""Fastest kernels of an all-reduce by number of ranks and size of a part.

Generated by benchmarks/kernels/all_reduce.py --write; do not edit. Measured on {device}.

The keys are numbers of ranks. An entry is a largest size of a part in bytes, in rising order, a
kernel of kernels/sums/all_reduce_triton.py, and its largest number of programs. Beyond the last
entry torch.distributed (NCCL) is faster.
"""

from __future__ import annotations

from typing import Literal

Entry = tuple[int, Literal["pushed", "one_shot", "two_shot"], int]

SUMS: dict[int, tuple[Entry, ...]] = {{
{"".join(lines)}}}
'''


def size_name(num_bytes: int) -> str:
    """Return a size in words: in MB, or in KB below one MB."""
    return f"{num_bytes >> 20} MB" if num_bytes >> 20 else f"{num_bytes >> 10} KB"


def print_table(ranks: int, rows: dict[int, Row]) -> None:
    """Print a Markdown table of the times of all sizes."""
    print(
        f"\n{ranks} GPUs, us:\n\n"
        "| bytes | NCCL | NCCL, norm | pushed | with residual and norm | one shot | with "
        "residual and norm | two shots | with residual and norm |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for size, row in rows.items():
        cells = [row["nccl"], row["nccl norm"]]
        cells += [best(row, kind, ending)[0] for kind in KINDS for ending in ("", " norm")]
        printed = [f"{cell:.1f}" if math.isfinite(cell) else "" for cell in cells]
        print(f"| {size_name(size)} | " + " | ".join(printed) + " |")


def run_rank(rank: int, ranks: int, meet: str) -> None:
    """Measure all sizes and, on rank 0, print a line of JSON for each."""
    process = Rank(rank, ranks, meet)
    for size in SIZES:
        row = process.measure(size)
        if rank == 0:
            assert all(math.isfinite(value) for value in row.values())
            print(json.dumps([size, row]), flush=True)


def run_ranks(ranks: int) -> dict[int, Row]:
    """Start a process for each GPU and return rank 0's measurements.

    Raises RuntimeError if one of them fails.
    """
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
    """Run the ranks, print the tables and write the chosen entries."""
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
