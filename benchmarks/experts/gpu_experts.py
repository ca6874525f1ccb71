"""Measure the kernels of a layer of experts on a GPU, beside the bytes that they must read.

    python benchmarks/experts/gpu_experts.py [--forms bf16 fp8] [--rows 1 8 256 8192] [--tune]

For each form of weights and number of rows it prints the time of the router, and of the experts'
products with the floor of their bytes or operations. --tune tries other configurations of each
product and prints the best of them; kernels/experts/experts_config.py is based on these figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_timing import DEVICE, DTYPE, Ceilings, Table, attempt, microseconds
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.experts.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.experts_config import (
    FewConfig,
    FewConfigs,
    SortedConfig,
    SortedConfigs,
    few_configs,
    sorted_configs,
)
from sidestep.kernels.experts.experts_triton import few_pairs, multiply_experts
from sidestep.kernels.experts.routing_triton import route
from sidestep.kernels.ops.routing import Choice, Routed

HIDDEN, INNER, EXPERTS, CHOSEN = 2048, 768, 128, 8
"""Sizes of Qwen3-30B-A3B."""
FORMS = ("bf16", "fp8", "fp8-block", "mxfp4")
SETS = 6
"""Sets of chosen experts, so that a few rows' matrices are not in the cache from run to run."""
Configs = FewConfigs | SortedConfigs


def matrices(form: str, rows: int, columns: int) -> ExpertMatrix:
    """Return the matrices of all experts."""
    size = EXPERTS, rows, columns
    if form == "bf16":
        return ExpertMatrix(torch.randn(size, dtype=DTYPE, device=DEVICE) * columns**-0.5)
    if form == "mxfp4":
        codes = torch.randint(0, 256, (*size[:2], columns // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.full((*size[:2], columns // 32), 122, dtype=torch.uint8, device=DEVICE)
        return ExpertMatrix(codes, scales=scales)
    values = torch.randn(size, device=DEVICE).to(torch.float8_e4m3fn)
    groups = (rows, 1) if form == "fp8" else (rows // 128, columns // 128)
    scales = torch.full((EXPERTS, *groups), columns**-0.5, device=DEVICE)
    return ExpertMatrix(values, scales=scales)


class Layer:
    """Experts of one form, and rows that choose among them."""

    def __init__(self, form: str, rows: int) -> None:
        self.form, self.rows = form, rows
        self.gate_up = matrices(form, 2 * INNER, HIDDEN)
        self.down = matrices(form, HIDDEN, INNER)
        self.router = torch.randn(EXPERTS, HIDDEN, dtype=DTYPE, device=DEVICE)
        self.x = [torch.randn(rows, HIDDEN, dtype=DTYPE, device=DEVICE) for _ in range(SETS)]
        self.out = torch.empty_like(self.x[0])
        self.routed = [self.choose(x) for x in self.x]

    def choose(self, x: torch.Tensor) -> Routed:
        """Return the experts of these rows."""
        return route(x, self.router, None, Choice(CHOSEN, normalised=True))

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least time of the products: for the weights read, or the operations."""
        used = sum(len(r.ids.unique()) for r in self.routed) / SETS
        one = sum(part.nbytes for part in (*self.gate_up, *self.down) if part is not None) / EXPERTS
        return ceilings.floor(used * one, 6.0 * self.rows * CHOSEN * HIDDEN * INNER)

    def calls(self, configs: Configs | None) -> list[Callable[[], object]]:
        """Return calls of the products, one a set of rows."""

        def call(x: torch.Tensor, routed: Routed) -> Callable[[], object]:
            return lambda: multiply_experts(
                x, routed, self.gate_up, self.down, self.out, add=True, configs=configs
            )

        return [call(*one) for one in zip(self.x, self.routed, strict=True)]

    def default(self) -> Configs:
        """Return the usual configurations."""
        if few_pairs(self.rows, CHOSEN, EXPERTS):
            return few_configs(self.down)
        return sorted_configs(self.rows * CHOSEN, EXPERTS)


def few_candidates(columns: tuple[int, ...]) -> Iterator[FewConfig]:
    """Yield configurations for a few pairs."""
    for n, step, warps, stages in itertools.product(columns, (128, 256, 512), (2, 4), (1, 3)):
        if 1024 <= n * step <= 8192:
            yield FewConfig(n, step, warps, stages)


def candidates(default: Configs, each: float) -> Iterator[Configs]:
    """Yield configurations in which one product differs from the default. each: pairs an expert."""
    if isinstance(default, FewConfigs):
        for few in few_candidates((4, 8, 16)):
            yield dataclasses.replace(default, gate_up=few)
        for few in few_candidates((2, 4, 8)):
            yield dataclasses.replace(default, down=few)
        return
    for pairs in (16, 32, 64, 128):
        if not each / 4 <= pairs <= 6 * each + 16:
            continue
        for columns, warps, stages, swapped in itertools.product(
            (64, 128), (4, 8), (3, 4), (False, True)
        ):
            if (pairs < 64 and not swapped) or (swapped and pairs > 64):
                continue
            if columns * pairs < 2048 * warps / 4 or columns * pairs > 4096 * warps / 2:
                continue
            one = SortedConfig(columns, warps=warps, stages=stages, swapped=swapped)
            yield SortedConfigs(pairs, one, one)


def measure(layer: Layer, ceilings: Ceilings, table: Table) -> None:
    """Add the lines of a form and number of rows."""
    routing = microseconds([lambda x=x: layer.choose(x) for x in layer.x])
    took = microseconds(layer.calls(None))
    floor = layer.floor(ceilings)
    table.add(
        f"{layer.form:10} {layer.rows:5} rows  router {routing:7.1f}  experts {took:8.1f}  "
        f"floor {floor:8.1f}  {floor / took:5.0%}"
    )


def tune(layer: Layer, table: Table) -> None:
    """Add the lines of the best configurations."""
    tried = list(candidates(layer.default(), layer.rows * CHOSEN / EXPERTS))
    with CompilerThreads(14) as threads, compiling_only(threads):
        for configs in tried:
            layer.calls(configs)[0]()
    found = sorted(
        ((attempt(lambda c=c: microseconds(layer.calls(c), 3)), c) for c in tried),
        key=lambda one: one[0],
    )
    for time, configs in found[:4] if not isinstance(tried[0], FewConfigs) else found[:6]:
        table.add(f"    {time:8.1f}  {configs}")


def main() -> None:
    """Measure the chosen forms and numbers of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256, 8192])
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    ceilings, table = Ceilings(), Table()
    for form, rows in itertools.product(args.forms, args.rows):
        layer = Layer(form, rows)
        measure(layer, ceilings, table)
        if args.tune:
            tune(layer, table)
        del layer
        torch.cuda.empty_cache()
    print("\n" + "\n".join(table.lines))


if __name__ == "__main__":
    main()
