"""Timing and checking of the GPU's kernels, and the GPU's limits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
L2_BYTES = 160 << 20
"""Bytes that alternating inputs hold together at least."""

Call = Callable[[], object]


class Ceilings:
    """Speeds that this GPU reaches.

    They are bytes a second of a copy and of a reading sum, and operations a second of a product, in
    units of 10^12.
    """

    def __init__(self) -> None:
        a = torch.randn(1 << 30, dtype=DTYPE, device=DEVICE)
        b = torch.empty_like(a)
        self.copy = 4 * a.numel() / microseconds([lambda: torch.neg(a, out=b)] * 2) / 1e6
        wide = a.view(torch.int32).view(1 << 13, -1)
        out = torch.empty(1 << 13, dtype=torch.float32, device=DEVICE)
        values = wide.view(torch.float32)
        self.read = 2 * a.numel() / microseconds([lambda: torch.amax(values, 1, out=out)] * 2) / 1e6
        m = torch.randn(8192, 8192, dtype=DTYPE, device=DEVICE)
        c = torch.empty_like(m)
        self.product = 2 * 8192**3 / microseconds([lambda: torch.mm(m, m, out=c)] * 3) / 1e6

    def floor(self, num_bytes: float, operations: float = 0.0) -> float:
        """Return the least time for these bytes and operations, in microseconds."""
        return max(num_bytes / max(self.copy, self.read), operations / self.product) / 1e6


def microseconds(calls: Sequence[Call], replays: int = 7) -> float:
    """Return a call's time within a CUDA graph of all of them: median over the replays, in us."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def repeated(calls: Sequence[Call], least: int) -> list[Call]:
    """Return the calls in turn, repeated until there are at least `least` of them."""
    return list(calls) * max(1, math.ceil(least / len(calls)))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Return the relative error, or infinity where an element is not a number."""
    error = ((out.double() - reference.double()).norm() / reference.double().norm()).item()
    return error if math.isfinite(error) else math.inf


class Table:
    """Lines that are printed again at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Keep and print a line."""
        self.lines.append(line)
        print(line)


def attempt(function: Callable[[], float]) -> float:
    """Return the time, or infinity if a configuration does not fit or the library has no kernel."""
    try:
        return function()
    except (OutOfResources, RuntimeError) as error:
        print(f"  {type(error).__name__}: {str(error)[:120]}")
        return math.inf
