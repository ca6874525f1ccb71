"""Measure the kernels of a layer of experts on a GPU, beside the bytes that they must read.

    python benchmarks/experts/gpu_experts.py [--forms bf16 mxfp4] [--rows 1 8 256 8192] [--tune]

For each form of weights and number of rows it prints the time of the router, and of the experts'
products with the floor of their bytes or operations. MXFP4 has the sizes of gpt-oss-20b, all else
those of Qwen3-30B-A3B. --tune tries other configurations and prints the best of them;
kernels/experts/common/experts_config.py is based on these figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_timing import DEVICE, DTYPE, Ceilings, Table, attempt, microseconds
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import (
    ClusterConfigs,
    CodedConfig,
    CodedConfigs,
    FewConfig,
    FewConfigs,
    RegisterConfig,
    RegisterConfigs,
    SortedConfig,
    SortedConfigs,
    StreamConfigs,
    WaitingConfig,
    few_configs,
    register_configs,
)
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.experts_triton import few_pairs, multiply_experts
from sidestep.kernels.experts.routing_triton import route
from sidestep.kernels.ops.routing import Choice, Routed
from sidestep.kernels.quantized.coded_matrix import CodedMatrix


class Sizes(NamedTuple):
    """Sizes of a layer."""

    hidden: int
    inner: int
    experts: int
    chosen: int


QWEN = Sizes(2048, 768, 128, 8)
"""Sizes of Qwen3-30B-A3B."""
FORMS = {"bf16": QWEN, "fp8": QWEN, "fp8-block": QWEN, "mxfp4": Sizes(2880, 2880, 32, 4)}
SETS = 6
"""Sets of chosen experts, so that a few rows' matrices are not in the cache from run to run."""
Configs = (
    FewConfigs | SortedConfigs | StreamConfigs | CodedConfigs | RegisterConfigs | ClusterConfigs
)


def coded(form: str, rows: int, columns: int) -> ExpertCodes:
    """Return an expert's matrix."""
    if form == "mxfp4":
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        scales = torch.randint(118, 122, (rows, columns // 32), dtype=torch.uint8, device=DEVICE)
        return ExpertCodes.of_mxfp4(ExpertMatrix(codes, None, scales))
    height, width = (1, columns) if form == "fp8" else (128, 128)
    groups = rows // height, columns // width
    return ExpertCodes.of(
        CodedMatrix(
            kind="fp8",
            codes=torch.randn(rows, columns, device=DEVICE).to(torch.float8_e4m3fn),
            scales=torch.rand(groups, device=DEVICE) * columns**-0.5,
            group=(height, width),
            dtype=DTYPE,
            activations="fp8",
        )
    )


def matrices(form: str, experts: int, rows: int, columns: int) -> ExpertMatrix | ExpertCodes:
    """Return the matrices of all experts."""
    if form == "bf16":
        values = torch.randn(experts, rows, columns, dtype=DTYPE, device=DEVICE)
        return ExpertMatrix(values * columns**-0.5)
    stack = coded(form, rows, columns).room_for(experts)
    for expert in range(experts):
        stack.put(expert, coded(form, rows, columns))
    return stack


class Layer:
    """Experts of one form, and rows that choose among them."""

    def __init__(self, form: str, rows: int) -> None:
        self.form, self.rows, self.sizes = form, rows, FORMS[form]
        hidden, inner, experts, _ = self.sizes
        self.gate_up = matrices(form, experts, 2 * inner, hidden)
        self.down = matrices(form, experts, hidden, inner)
        self.router = torch.randn(experts, hidden, dtype=DTYPE, device=DEVICE)
        self.x = [torch.randn(rows, hidden, dtype=DTYPE, device=DEVICE) for _ in range(SETS)]
        self.out = torch.empty_like(self.x[0])
        self.routed = [self.choose(x) for x in self.x]

    def choose(self, x: torch.Tensor) -> Routed:
        """Return the experts of these rows."""
        return decided(route(x, self.router, None, Choice(self.sizes.chosen, normalised=True)))

    def floor(self, ceilings: Ceilings) -> float:
        """Return the least time of the products: for the weights read, or the operations."""
        hidden, inner, experts, chosen = self.sizes
        used = sum(len(r.ids.unique()) for r in self.routed) / SETS
        one = (self.gate_up.nbytes + self.down.nbytes) / experts
        return ceilings.floor(used * one, 6.0 * self.rows * chosen * hidden * inner)

    def calls(self, configs: Configs | None) -> list[Callable[[], object]]:
        """Return calls of the products, one a set of rows."""

        def call(x: torch.Tensor, routed: Routed) -> Callable[[], object]:
            return lambda: multiply_experts(
                x, routed, self.gate_up, self.down, self.out, add=True, configs=configs
            )

        return [call(*one) for one in zip(self.x, self.routed, strict=True)]


def few_candidates() -> Iterator[Configs]:
    """Yield configurations for a few pairs."""
    default = few_configs()
    for n, step, warps, stages in itertools.product((2, 4, 8, 16), (128, 256, 512), (2, 4), (1, 3)):
        if 1024 <= n * step <= 8192:
            one = FewConfig(n, step, warps, stages)
            yield dataclasses.replace(default, gate_up=one)
            if n < 16:
                yield dataclasses.replace(default, down=one)
                yield dataclasses.replace(default, down=dataclasses.replace(one, registers=128))
    for n, warps in itertools.product((4, 8, 16), (4, 8)):
        yield dataclasses.replace(default, down=WaitingConfig(n, warps))


def register_candidates(layer: Layer) -> Iterator[Configs]:
    """Yield configurations for a few pairs of coded experts from registers."""
    kept = 1 << (layer.sizes.chosen - 1).bit_length()
    sizes = layer.rows, layer.sizes.hidden, layer.sizes.inner, layer.sizes.chosen
    default = register_configs(*sizes, four_bits=layer.form == "mxfp4")
    assert default is not None
    for rows, warps, stages in itertools.product((16, 32), (4, 8), (1, 2, 3, 4)):
        yield dataclasses.replace(default, gate_up=RegisterConfig(warps, stages), rows=rows)
    for warps, stages in itertools.product((4, 8, 16), (1, 2, 3, 4, 6)):
        if warps >= kept:
            for waits in (False, True) if stages == 1 else (False,):
                yield dataclasses.replace(default, down=RegisterConfig(warps, stages, waits))


def coded_candidates() -> Iterator[Configs]:
    """Yield configurations for a few pairs of coded experts, and for more."""
    for rows, warps, stages in itertools.product((64, 128), (4, 8), (3, 4, 5, 6)):
        one = CodedConfig(rows, warps, stages)
        yield CodedConfigs(one, one)
    for rows, pairs, warps, stages in itertools.product(
        (64, 128, 256), (16, 32, 64, 128), (4, 8), (3, 4)
    ):
        if 1024 <= rows * pairs // warps * 2 <= 8192:
            one = CodedConfig(rows, warps, stages)
            yield CodedConfigs(one, one, pairs, in_tiles=True)


def sorted_candidates() -> Iterator[Configs]:
    """Yield configurations for sorted pairs."""
    for pairs in range(16, 72, 8):
        yield StreamConfigs(pairs)
    yield SortedConfigs(32, *[SortedConfig(128, warps=8, swapped=True)] * 2)


def candidates(layer: Layer) -> Iterator[Configs]:
    """Yield the configurations that a layer may have."""
    if layer.form != "bf16":
        if few_pairs(layer.rows, layer.sizes.chosen, layer.sizes.experts):
            yield from register_candidates(layer)
        yield from coded_candidates()
        if layer.form != "mxfp4":
            yield ClusterConfigs()
    else:
        if few_pairs(layer.rows, layer.sizes.chosen, layer.sizes.experts):
            yield from few_candidates()
        yield from sorted_candidates()
        yield ClusterConfigs()


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
    tried = list(candidates(layer))
    with CompilerThreads(14) as threads, compiling_only(threads):
        for configs in tried:
            layer.calls(configs)[0]()
    found = sorted(
        ((attempt(lambda c=c: microseconds(layer.calls(c), 3)), c) for c in tried),
        key=lambda one: one[0],
    )
    for time, configs in found[:6]:
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
