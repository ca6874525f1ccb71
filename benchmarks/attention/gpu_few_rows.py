"""Measure decode attention of few rows within a chain of layers, in several configurations.

    python benchmarks/attention/gpu_few_rows.py [--models NAME ...] [--rows 1 8 16] [--context 1024]

The first column is the floor of a layer's keys and values. "hop" has a norm of the queries in the
place of attention: it is what a kernel costs in the chain that waits for one product and is waited
for by the next. Other columns are what attention adds to a layer. Each
configuration is checked against float64 first, with outputs and scratch that are poisoned.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_attention import Paged
from benchmarks.kernels.gpu_compilation import in_processes
from benchmarks.kernels.gpu_layers import Layers
from benchmarks.kernels.gpu_models import MODELS, Model
from benchmarks.kernels.gpu_timing import DEVICE, DTYPE, Ceilings, relative_error
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig, FewConfig, decode_config
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.triton.rms_norm_triton import rms_norm

WIDE_GROUP = Model("Qwen3-30B-A3B-like", 2048, 32, 4, 6144, 151936, 48, 12, head_norms=True)
"""Its inner size is that of the 8 experts of a token."""
LARGE_HEADS = Model("Qwen3-Next-like", 2048, 16, 2, 5632, 151936, 12, 12, 256, head_norms=True)
ALL_MODELS = {model.name: model for model in (*MODELS, WIDE_GROUP, LARGE_HEADS)}


def variants(model: Model) -> dict[str, DecodeConfig]:
    """Return configurations by name; the general kernel's is the first."""
    general = replace(decode_config(model.head_dim, 2, model.heads), few=None)
    few = {
        "32p4w2s3m3": FewConfig(),
        "w1": FewConfig(num_warps=1),
        "w4": FewConfig(num_warps=4),
        "s2": FewConfig(stages=2),
        "m1": FewConfig(min_tiles=1),
        "m4": FewConfig(min_tiles=4),
        "w4m1 32 at once": FewConfig(num_warps=4, min_tiles=1, combined=32),
        "64p2s2": FewConfig(tile=64, stages=2, programs_per_processor=2),
        "16p8s3": FewConfig(tile=16, programs_per_processor=8),
    }
    return {
        "general": general,
        **{name: replace(general, few=replace(c, most_rows=16)) for name, c in few.items()},
    }


class HopLayers(Layers):
    """Layers without attention, but with a kernel in its place."""

    def _attend(self, qkv: Tensor, cache: Tensor) -> Tensor:
        size = self.model.heads * self.model.head_dim
        queries = qkv.flatten()[: self.rows * size].view(self.rows, size)
        return rms_norm(queries, self._ones[:size], 1e-6)

    @property
    def _ones(self) -> Tensor:
        return self._before.setdefault("ones", torch.ones(8192, dtype=DTYPE, device=DEVICE))


def errors(model: Model, lengths: list[int], config: DecodeConfig) -> dict[str, float]:
    """Return relative errors against float64 for rows of these lengths.

    They are those of the new keys and values in the cache, and of the results.
    """
    m, dim = model, model.head_dim
    paged = Paged(model, lengths, [1] * len(lengths), 64, 1)
    generator = torch.Generator(DEVICE).manual_seed(5)
    heads = m.heads + 2 * m.kv_heads
    qkv = torch.randn(len(lengths), heads * dim, dtype=DTYPE, device=DEVICE, generator=generator)
    angles = torch.rand(max(lengths), dim // 2, device=DEVICE, generator=generator) * 6.0
    weights = torch.rand(2, dim, device=DEVICE, generator=generator).to(DTYPE) + 0.5
    norms = (weights[0], weights[1]) if m.head_norms else None
    rope = Rope(angles.cos(), angles.sin(), norms, 1e-6)
    scratch = DecodeScratch(m.heads, m.kv_heads, dim, len(lengths), DEVICE, config)
    paged.plan(config.tile, 16)
    work = paged.plan_few(scratch)
    out = torch.full((len(lengths), m.heads * dim), math.nan, dtype=DTYPE, device=DEVICE)
    blocks = [int(paged.tables[r, (n - 1) // 64]) for r, n in enumerate(lengths)]
    for row, n in enumerate(lengths):
        paged.caches[0][blocks[row], :, (n - 1) % 64] = math.nan
    for _ in range(3):
        out.fill_(math.nan)
        decode_attention(
            qkv,
            paged.caches[0],
            paged.tables,
            paged.slots,
            paged.seq_lens,
            paged.decode_ends,
            out,
            scratch,
            num_heads=m.heads,
            window=0,
            scale=dim**-0.5,
            rope=rope,
            few_work=work,
        )
    split = qkv.view(len(lengths), heads, dim)
    worst = dict.fromkeys(("keys", "values", "results"), 0.0)
    for row, n in enumerate(lengths):
        q = _turned(split[row, : m.heads], rope, n - 1, 0).view(m.kv_heads, -1, dim)
        k = _turned(split[row, m.heads : m.heads + m.kv_heads], rope, n - 1, 1)
        key, value = (x.double() for x in paged.keys_values(row))
        new_value = split[row, m.heads + m.kv_heads :].double()
        of_row = {
            "keys": relative_error(key[:, -1], k),
            "values": relative_error(value[:, -1], new_value),
        }
        key[:, -1], value[:, -1] = k, new_value
        scores = torch.einsum("kgd,kld->kgl", q, key) * dim**-0.5
        reference = torch.einsum("kgl,kld->kgd", scores.softmax(-1), value)
        of_row["results"] = relative_error(out[row].view_as(reference), reference)
        worst = {name: max(worst[name], of_row[name]) for name in worst}
    return worst


def _turned(x: Tensor, rope: Rope, position: int, which: int) -> Tensor:
    """Return heads [N, D], normalised and rotated, in float64, but rounded where models round."""
    x = x.double()
    if rope.norms is not None:
        x = x / (x.square().mean(-1, keepdim=True) + rope.eps).sqrt()
        x = (x.to(DTYPE).double() * rope.norms[which].double()).to(DTYPE).double()
    cos, sin = rope.cos[position].double(), rope.sin[position].double()
    low, high = x.chunk(2, -1)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    return turned.to(DTYPE).double()


@torch.inference_mode()
def _compile(index: int, of: int, names: list[str]) -> None:
    """Compile this process's share of the kernels, by running them."""
    torch.cuda.set_device(0)
    configs = [(m, c) for m in names for c in variants(ALL_MODELS[m]).values()]
    for name, config in configs[index::of]:
        for lengths in ([70], [70, 70]):
            errors(ALL_MODELS[name], lengths, config)


def _report(model: Model, rows: int, context: int, ceilings: Ceilings) -> None:
    begin = time.perf_counter()
    case = Layers(model, rows, context)
    case.run({})
    without = case.time({}, "attention")
    hop = HopLayers.__new__(HopLayers)
    hop.__dict__ = case.__dict__
    columns = [f"hop {hop.time({}) - without:.2f}"]
    for name, config in variants(model).items():
        checked = ([context] * rows, [1, 700, 3000])
        wrong = max(max(errors(model, lengths, config).values()) for lengths in checked)
        case.set_decode(config)
        took = case.time({}) - without
        columns.append(f"{name} {took:.2f}" + ("" if wrong < 1e-2 else f" WRONG ({wrong})"))
    floor = ceilings.floor(case.bytes()["attention"])
    print(
        f"{model.name}, {rows} rows: floor {floor:.2f}, layer without {without:.2f}; "
        + "; ".join(columns)
        + f" ({time.perf_counter() - begin:.0f} s)",
        flush=True,
    )


@torch.inference_mode()
def main() -> None:
    """Print a line for each model and number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(ALL_MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    in_processes(_compile, args.models)
    torch.manual_seed(0)
    ceilings = Ceilings()
    for rows in args.rows:
        for name in args.models:
            _report(ALL_MODELS[name], rows, args.context, ceilings)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
