"""Measure which layout of a weight is fastest on this CPU, by shape and number of rows.

    python benchmarks/host/cpu_linear.py [--threads 2] [--rows 1 8]

The engine's layouts (executor/layers/cpu_product.py) are based on these figures. They are
microseconds per product in float32: torch's plain product, the same with the weight stored
transposed, oneDNN's packed form, and the kernel in C where there is a compiler. Each shape has six
weights that alternate, as layers do.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence

import torch

from sidestep.executor.layers.layouts.native_layouts import native_plain
from sidestep.ipc.config import cache_folder_of_environment
from sidestep.kernels.native.library import keep_in

SHAPES = (
    (384, 192),
    (192, 192),
    (1024, 192),
    (192, 512),
    (4096, 192),
    (1536, 256),
    (3072, 1024),
    (4096, 1024),
    (8192, 1024),
    (1024, 4096),
)


def microseconds(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Return the best mean time of four rounds."""
    rounds, best = max(1, 200 // len(calls)), float("inf")
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        best = min(best, (time.perf_counter() - start) / rounds / len(calls))
    return best * 1e6


def compare(rows: int, shape: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the times of the plain, transposed and packed products, and of that in C or NaN."""
    x = torch.randn(rows, shape[1])
    weights = [torch.randn(shape) for _ in range(6)]
    transposed = [w.t().contiguous() for w in weights]
    native = [laid_out[0] for w in weights if (laid_out := native_plain(w)) is not None]
    packed = [torch.ops.mkldnn._reorder_linear_weight(w, 8) for w in weights]
    return (
        microseconds([lambda w=w: torch.nn.functional.linear(x, w) for w in weights]),
        microseconds([lambda w=w: torch.mm(x, w) for w in transposed]),
        microseconds(
            [
                lambda w=w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
                for w in packed
            ]
        ),
        microseconds([lambda p=p: p(x) for p in native]) if native else math.nan,
    )


@torch.inference_mode()
def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_in(cache_folder_of_environment())
    print(f"{'out x in':>12} {'rows':>5} {'plain':>8} {'transposed':>11} {'packed':>8} {'in C':>8}")
    for shape in SHAPES:
        for rows in options.rows:
            times = compare(rows, shape)
            print(
                f"{f'{shape[0]} x {shape[1]}':>12} {rows:>5} {times[0]:>8.0f} {times[1]:>11.0f} "
                f"{times[2]:>8.0f} {times[3]:>8.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
