"""Which products of a layer should be streamed (kernels/streamed_linear_gluon.py), and how.

    python benchmarks/gpu_streamed.py [--models llama-3.1-8b] [--batches 96 128]

First a decode step's layer in a chain of them, at 768 tokens: all products from the library, as shipped, all streamed,
and streamed but for one at a time. Then each matrix alone over copies that L2 does not hold, from the library and by
several configurations, each checked against float64. All in us, on a Hopper GPU; all kernels are compiled first.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_layers import Configs, Layers
from benchmarks.gpu_models import MODELS, Model
from benchmarks.gpu_products import Linear
from benchmarks.gpu_timing import DEVICE, DTYPE, attempt, relative_error
from sidestep.kernels import streamed_config
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.own_linear import own_linear
from sidestep.kernels.streamed_config import MOST_PARTIALS, StreamedConfig, padded

Shape = tuple[int, int, bool]
CONTEXT = 768


def matrices(model: Model) -> dict[str, Shape]:
    """Those of a layer, and the last one."""
    return {**model.linears(), "lm_head": (model.vocab, model.hidden, False)}


def layer_variants(model: Model, rows: int) -> dict[str, Configs]:
    """By what the table calls them."""
    shapes = model.linears()
    streamed: Configs = {name: streamed_config.config(rows, *shape) for name, shape in shapes.items()}
    return {"library": dict.fromkeys(shapes), "as shipped": {}, "streamed": streamed,
            **{f"without {name}": {**streamed, name: None} for name in shapes}}


def tried_configs(shape: Shape, rows: int) -> list[StreamedConfig]:
    """As the rule says, and beside it: fewer stages, other numbers of programs, tiles of other heights."""
    rule = streamed_config.config(rows, *shape)
    outputs, _, gated = shape
    tried = [rule, *(dataclasses.replace(rule, stages=n) for n in (3, 4, 5) if n < rule.stages)]
    tried += [dataclasses.replace(rule, split=n) for n in (1, 2, 4) if n != rule.split]
    tried.append(dataclasses.replace(rule, stages=3, split=2 * rule.split))  # two programs a processor
    for block_n in {64, 128} if gated else {64, 128, 256}:
        if block_n != rule.block_n:
            stage, programs = 2 * 64 * (block_n * (1 + gated) + padded(rows)), -(-outputs // block_n)
            split = 1 << (132 // programs).bit_length() - 1 if programs <= 132 else 1
            tried.append(StreamedConfig(64, (200 << 10) // stage, split, block_n))

    def partials(c: StreamedConfig) -> int:
        return -(-outputs // c.block_n) * c.split * c.block_n * padded(rows) * (1 + gated)

    return list(dict.fromkeys(c for c in tried if c.split == 1 or partials(c) <= MOST_PARTIALS))


def compile_ahead(model: Model, batches: list[int]) -> None:
    """All kernels that will be launched, in threads."""
    begin = time.perf_counter()
    layers = [Layers(dataclasses.replace(model, kept=1), rows, 65) for rows in batches]
    with CompilerThreads(os.cpu_count() or 1) as threads, compiling_only(threads):
        for layer in layers:
            for configs in layer_variants(model, layer.rows).values():
                layer.run(configs)
        for outputs, inputs, gated in matrices(model).values():
            weight = torch.empty(outputs * (1 + gated), inputs, dtype=DTYPE, device=DEVICE)
            for rows in batches:
                x = torch.empty(rows, inputs, dtype=DTYPE, device=DEVICE)
                for config in tried_configs((outputs, inputs, gated), rows):
                    own_linear(x, weight, gated=gated, config=config)
    print(f"compiled in {time.perf_counter() - begin:.0f} s")


def time_layers(model: Model, rows: int) -> None:
    """One line of figures, and whether they are of right results."""
    case = Layers(model, rows, CONTEXT)
    variants = layer_variants(model, rows)
    print(f"{model.name}, {rows} rows, a layer: " + ", ".join(
        f"{name} {attempt(lambda c=configs: case.time(c)):.1f}" for name, configs in variants.items()))
    error = relative_error(case.run(variants["streamed"]), case.run(variants["library"]))
    print(f"  streamed: from the library {error:.2%} apart, same with and without overlap: "
          f"{case.agrees(variants['streamed'])}")


def time_alone(model: Model, rows: int) -> None:
    """A line for each matrix: the library, then configurations, the fastest first."""
    for name, shape in matrices(model).items():
        case = Linear(*shape, rows)
        took = sorted((attempt(lambda c=c, case=case: case.time(c)), str(dataclasses.astuple(c)))
                      for c in tried_configs(shape, rows))
        rule = dataclasses.astuple(streamed_config.config(rows, *shape))
        print(f"{model.name}, {rows} rows, {name}: library {case.library():.1f}; the rule {rule}; "
              + ", ".join(f"{us:.1f} {config}" for us, config in took))


@torch.inference_mode()
def main() -> None:
    """Configurations are printed as (columns of a tile, stages, programs that share them, rows of W)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], choices=[m.name.lower() for m in MODELS])
    parser.add_argument("--batches", nargs="+", type=int, default=[96, 128])
    options = parser.parse_args()
    torch.manual_seed(0)
    for model in MODELS:
        if model.name.lower() in options.models:
            compile_ahead(model, options.batches)
            for rows in options.batches:
                time_layers(model, rows)
            for rows in options.batches:
                time_alone(model, rows)


if __name__ == "__main__":
    main()
