"""Products with matrices in 8 or 4 bits on a GPU, beside those in bfloat16.

`python benchmarks/quantized/coded_products.py` prints for each shape, form and number of rows: the
time, its share of the floor, the bfloat16 product's time, and the error. The floor is the time to
read the codes and scales, or to compute the product on the tensor cores for 16 bits, at the speeds
that this GPU reaches. `--tune` tries other tiles, splits and stages, and prints the best of them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_timing import (
    DEVICE,
    DTYPE,
    L2_BYTES,
    Call,
    Ceilings,
    Table,
    attempt,
    microseconds,
    relative_error,
    repeated,
)
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.ops.silu_mul import computed, silu_mul
from sidestep.kernels.products.coded_linear import (
    MAX_ROWS,
    choose,
    coded_gated_linear,
    coded_linear,
    streams,
    wide_config,
)
from sidestep.kernels.products.coded_linear_triton import CodedConfig
from sidestep.kernels.products.linear import gated_linear, linear
from sidestep.kernels.products.own_linear import own_linear
from sidestep.kernels.products.streamed_config import OneRowConfig, StreamedConfig, WideConfig
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, Codes, Rounded, pack_halves
from sidestep.kernels.quantized.device_matrix import DeviceMatrix

WHOLE = 1 << 30
FORMS: dict[str, tuple[Codes, tuple[int, int], bool, bool, Rounded | None]] = {
    "fp8-block": ("fp8", (128, 128), False, False, None),
    "fp8-block-rounded": ("fp8", (128, 128), False, False, "fp8"),
    "fp8": ("fp8", (1, WHOLE), False, False, None),
    "fp8-rounded": ("fp8", (1, WHOLE), False, False, "fp8"),
    "int8": ("int8", (1, WHOLE), False, False, None),
    "int8-rounded": ("int8", (1, WHOLE), False, False, "int8"),
    "int4": ("int4", (1, 128), False, False, None),
    "int4-zeros": ("int4", (1, 128), True, False, None),
    "q4_k": ("int4", (1, 32), False, True, None),
    "mxfp4": ("fp4", (1, 32), False, False, None),
    "nf4": ("nf4", (1, 64), False, False, None),
}
"""Codes, groups, whether there are zeros and minimums, and the type of rounded inputs."""
SHAPES = {
    "qwen3-0.6b qkv": (4096, 1024, False),
    "qwen3-0.6b gate_up": (3072, 1024, True),
    "qwen3-0.6b down": (1024, 3072, False),
    "llama-3.1-8b qkv": (6144, 4096, False),
    "llama-3.1-8b o": (4096, 4096, False),
    "llama-3.1-8b gate_up": (14336, 4096, True),
    "llama-3.1-8b down": (4096, 14336, False),
    "llama-3.1-8b lm_head": (128256, 4096, False),
}
"""Outputs (of each half, if gated), inputs, and whether the product is gated."""


def random_matrix(form: str, rows: int, columns: int, device: torch.device = DEVICE) -> CodedMatrix:
    """Return a matrix whose products with normal numbers are about 1 in size."""
    kind, (height, width), zeros, minimums, activations = FORMS[form]
    height, width = min(height, rows), min(width, columns)
    if kind == "fp8":
        codes = torch.randn(rows, columns, device=device, dtype=DTYPE).to(torch.float8_e4m3fn)
        size = 1.0
    elif kind == "int8":
        codes = torch.randint(-127, 128, (rows, columns), device=device, dtype=torch.int8)
        size = 74.0
    else:
        halves = torch.randint(0, 16, (rows, columns), device=device, dtype=torch.uint8)
        codes, size = pack_halves(halves), {"int4": 5.0, "fp4": 3.0, "nf4": 0.5}[kind]
    groups = -(-rows // height), -(-columns // width)
    scales = (0.5 + torch.rand(groups, device=device)) / (size * columns**0.5)
    small = torch.rand(groups, device=device) / columns**0.5
    return CodedMatrix(
        kind=kind,
        codes=codes,
        scales=scales.half().float(),
        group=(height, width),
        dtype=DTYPE,
        zeros=torch.randint(0, 16, groups, device=device, dtype=torch.uint8) if zeros else None,
        minimums=small if minimums else None,
        activations=activations,
    )


class Case:
    """Copies of a matrix, together larger than L2, and of the same matrix in bfloat16."""

    def __init__(self, form: str, shape: tuple[int, int, bool]) -> None:
        outputs, self.inputs, self.gated = shape
        given = random_matrix(form, outputs * (1 + self.gated), self.inputs)
        matrix = DeviceMatrix.of(given)
        self.bytes = sum(
            part.numel() * part.itemsize
            for part in (matrix.words, matrix.scales, matrix.minimums)
            if part is not None
        )
        copies = max(2, math.ceil(2 * L2_BYTES / self.bytes))
        self.matrices = [matrix]
        self.matrices += [
            replace(matrix, words=matrix.words.clone(), scales=matrix.scales.clone())
            for _ in range(copies - 1)
        ]
        self.plain = given.decoded()
        self.numbers = matrix.shape[0] * self.inputs

    def reference(self, x: Tensor) -> Tensor:
        """Return some columns of the product, in float64."""
        out = torch.cat(
            [x.double() @ half[:256].double().T for half in self.plain.chunk(1 + self.gated)], 1
        )
        if not self.gated:
            return out
        gate, up = out.chunk(2, 1)
        return F.silu(gate) * up

    def product(self, x: Tensor, matrix: DeviceMatrix, config: Config | None) -> Tensor:
        """Return the product, by the engine's choice if no configuration is given."""
        if isinstance(config, WideConfig):
            return wide_product(x, matrix, config, self.gated)
        if config is not None:
            return own_linear(x, matrix, gated=self.gated, config=config)
        return computed((coded_gated_linear if self.gated else coded_linear)(x, matrix, None))

    def took(self, x: Tensor, config: Config | None = None) -> float:
        """Return the time in microseconds, or infinity where a configuration does not fit."""
        calls: list[Call] = [lambda m=m: self.product(x, m, config) for m in self.matrices]
        return attempt(lambda: microseconds(repeated(calls, 20)))

    def error(self, x: Tensor, config: Config | None = None) -> float:
        """Return the relative error, or infinity if a row depends on the number of rows."""

        def found() -> float:
            out = self.product(x, self.matrices[0], config)
            if len(x) <= MAX_ROWS:
                alone = self.product(x[-1:], self.matrices[0], config)
                if not torch.equal(alone[0], out[-1]):
                    return math.inf
            return relative_error(out[:, :256], self.reference(x))

        return attempt(found)

    def plain_took(self, x: Tensor) -> float:
        """Return the time of the bfloat16 product."""
        copies = max(2, min(8, math.ceil(2 * L2_BYTES / self.plain.numel() / 2)))
        plain = [self.plain] + [self.plain.clone() for _ in range(copies - 1)]
        calls: list[Call] = [
            (lambda w=w: gated_linear(x, w, None))
            if self.gated
            else (lambda w=w: linear(x, w, None))
            for w in plain
        ]
        return attempt(lambda: microseconds(repeated(calls, 20)))


Config = CodedConfig | StreamedConfig | WideConfig | OneRowConfig


def wide_product(x: Tensor, matrix: DeviceMatrix, config: WideConfig, gated: bool) -> Tensor:
    """Return the product by the kernel for Hopper and many rows."""
    from sidestep.kernels.products.wide_codes_gluon import launch

    out = x.new_full((len(x), matrix.shape[0]), math.nan)
    launch(x, matrix, None, out, False, config)
    return silu_mul(out) if gated else out


WIDE = (
    WideConfig(128, 128, 2, num_warps=4),
    WideConfig(128, 128, 2, step=256),
    WideConfig(128, 256, 3),
    WideConfig(256, 128, 2, step=256, unroll=1),
    WideConfig(256, 64, 3, step=256, unroll=1),
)


def configs(chosen: Config, rows: int, outputs: int) -> Iterator[Config]:
    """Return configurations of the chosen kernel."""
    # Only small matrices have too few tiles for all processors.
    splits = (1, 2, 4, 8) if rows <= MAX_ROWS and outputs <= 1 << 14 else (1,)
    if isinstance(chosen, WideConfig):
        for split in (1, 2, 3, 4):
            if split == 1 or -(-outputs // 128) * -(-rows // 256) * split <= 132:
                for given in WIDE:
                    yield replace(given, split=split)
        return
    if isinstance(chosen, OneRowConfig):
        for warps, groups in itertools.product((2, 4, 8), (1, 2)):
            yield OneRowConfig(warps, groups)
        return
    if isinstance(chosen, StreamedConfig):
        for split, stages in itertools.product(splits, (4, 6, 8, 10, 12, 16)):
            yield StreamedConfig(chosen.block_k, stages, split)
        return
    tiles = [(64, chosen.rows)] if rows <= MAX_ROWS else [(64, 64), (64, 128), (128, 64)]
    tiles += [] if rows <= MAX_ROWS else [(128, 128), (128, 256)]
    for (block, tile), split, warps, stages in itertools.product(
        tiles, splits, (4, 8), (2, 3, 4, 6, 8)
    ):
        yield CodedConfig(block, tile, split, warps, stages)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=list(FORMS))
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16, 32, 64, 256, 2048])
    parser.add_argument("--tune", action="store_true", help="try other configurations")
    options = parser.parse_args()
    torch.manual_seed(0)
    ceilings, table = Ceilings(), Table()
    table.add(f"{torch.cuda.get_device_name()}, {max(ceilings.copy, ceilings.read):.2f} TB/s")
    table.add("shape; form; rows: us, share of the floor, us in bfloat16, ratio, error")
    for shape, form in itertools.product(options.shapes, options.forms):
        case = Case(form, SHAPES[shape])
        for rows in options.rows:
            if rows > MAX_ROWS and "lm_head" in shape:
                continue
            x = torch.randn(rows, case.inputs, dtype=DTYPE, device=DEVICE)
            took, plain, error = case.took(x), case.plain_took(x), case.error(x)
            floor = ceilings.floor(case.bytes, 2.0 * rows * case.numbers)
            table.add(
                f"{shape}; {form}; {rows}: {took:.2f}, {floor / took:.0%}, {plain:.2f}, "
                f"{plain / took:.2f}, {error:.1e}"
            )
            if options.tune:
                first = case.matrices[0]
                chosen: Config = choose(rows, first, case.gated)
                if rows > MAX_ROWS and first.in_word == 8 and streams(first):
                    chosen = wide_config(rows, first)
                tried = list(configs(chosen, rows, SHAPES[shape][0]))
                with CompilerThreads(os.cpu_count() or 1) as threads, compiling_only(threads):
                    for c in tried:
                        case.product(x, case.matrices[0], c)
                times = {c: case.took(x, c) for c in tried}
                best = min(times, key=lambda c: times[c])
                table.add(f"  best {best}: {times[best]:.2f}, error {case.error(x, best):.1e}")
        del case
        torch.cuda.empty_cache()
    print("\n".join(["", *table.lines]))


if __name__ == "__main__":
    main()
