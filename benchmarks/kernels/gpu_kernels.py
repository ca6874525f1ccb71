"""Measure how far each kernel of a step is from the GPU's limits.

    python benchmarks/kernels/gpu_kernels.py [--only decode,gated,prefill,linear,layers,small]
        [--tune] [--write FILE]

The kernels' configurations are based on these figures. Each kernel is checked against a reference
in higher precision. It is then timed in a CUDA graph of many launches over alternating inputs that
are together larger than the L2 cache. The floor is bytes over the bandwidth of a large read, or
operations over the rate of a large matrix product, both measured first. --tune tries configurations
of the kernels that have them and prints the best; their compilation is spread over processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_attention import Decode, Paged, Prefill
from benchmarks.kernels.gpu_compilation import compile_all
from benchmarks.kernels.gpu_configs import (
    GATED_ROWS,
    SEVERAL_QUERIES,
    TUNED_ROWS,
    decode_configs,
    gated_configs,
    prefill_configs,
    product_configs,
)
from benchmarks.kernels.gpu_layers import Configs, Layers
from benchmarks.kernels.gpu_models import MODELS, Model
from benchmarks.kernels.gpu_products import Gated, Linear
from benchmarks.kernels.gpu_timing import (
    DEVICE,
    DTYPE,
    L2_BYTES,
    Ceilings,
    Table,
    attempt,
    microseconds,
)
from benchmarks.kernels.gpu_tuning import tune_layer, write_products
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_config import config_of
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.triton.rms_norm_triton import rms_norm
from sidestep.kernels.triton.silu_mul_triton import silu_mul


def ragged(rows: int) -> list[int]:
    """Return lengths from 100 to 2048, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(100, 2049, (rows,), generator=generator).tolist()


def decode_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Time decode attention, by batch, length and number of query tokens a row."""
    table.add("decode attention, us: floor, kernel (floor's share), torch")
    for model in MODELS[: 1 if tune else 2]:
        cases = {
            "64 x 1k": [1024] * 64,
            "64 x 4k": [4096] * 64,
            "64 x 16k": [16384] * 64,
            "1 x 768": [768],
            "8 x 768": [768] * 8,
            "256 x 1k": [1024] * 256,
            "256 ragged": ragged(256),
        }
        for name, lengths in cases.items():
            sizes = (16, 32, 64, 128) if name in ("64 x 1k", "1 x 768") and not tune else (64,)
            for block_size, queries in (*((size, 1) for size in sizes), (64, SEVERAL_QUERIES)):
                case = Decode(model, lengths, block_size, queries=queries)
                floor = ceilings.floor(case.bytes)
                used = config_of(128, 2, model.heads, model.kv_heads, queries)
                took = attempt(lambda case=case, used=used: case.time(used))
                library = (
                    attempt(case.library)
                    if len(set(lengths)) == 1 and block_size == 64
                    else math.nan
                )
                table.add(
                    f"  {model.name} {name} block {block_size} queries {queries}: {floor:.2f} "
                    f"{took:.2f} ({floor / took:.0%}) {library:.2f}"
                )
                if tune:
                    best = sorted(
                        (attempt(lambda c=c, case=case: case.time(c)), str(c))
                        for c in decode_configs()
                    )
                    for time_, config in best:
                        print(f"    {time_:.2f} ({floor / time_:.0%}) {config}")
                    table.add("    best: " + "; ".join(f"{t:.2f} {c[12:]}" for t, c in best[:4]))
                del case


def prefill_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Time causal attention of prompts."""
    table.add("prefill attention: TFLOP/s of the kernel and of torch")
    for model in MODELS:
        for name, lengths in {"1 x 8k": [8192], "16 x 512": [512] * 16}.items():
            for block_size in (64,) if tune else (16, 32, 64, 128):
                case = Prefill(model, lengths, block_size)
                took = attempt(lambda case=case: case.time(case.shipped))
                library = attempt(case.library)
                table.add(
                    f"  {model.name} {name} block {block_size}: {case.operations / took / 1e6:.0f} "
                    f"{case.operations / library / 1e6:.0f}"
                )
                if tune:
                    best = sorted(
                        (attempt(lambda c=c, case=case: case.time(c)), str(c))
                        for c in prefill_configs()
                        if block_size == max(64, c.keys)
                    )
                    rates = [
                        f"{case.operations / took / 1e6:.0f} {config[13:]}" for took, config in best
                    ]
                    print("    " + "\n    ".join(rates))
                    table.add("    best: " + "; ".join(rates[:4]))
                del case


def linear_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Time each matrix alone, launched back to back over distinct copies."""
    table.add(f"linear, us: floor; then kernel / library at {', '.join(map(str, TUNED_ROWS))} rows")
    for model in MODELS:
        for name, (n, k, gated) in {
            **model.linears(),
            "lm_head": (model.vocab, model.hidden, False),
        }.items():
            if tune and name != "lm_head":
                continue
            figures, floor = [], 0.0
            for rows in TUNED_ROWS:
                case = Linear(n, k, gated, rows)
                floor = ceilings.floor(case.bytes)
                figures.append(f"{attempt(case.time):.2f} / {attempt(case.library):.2f}")
                if tune:
                    tried = product_configs((n, k, gated), rows)
                    best = sorted(
                        (attempt(lambda c=c, case=case: case.time(c)), str(c)[13:]) for c in tried
                    )
                    table.add(
                        f"    rows {rows} best: " + "; ".join(f"{t:.2f} {c}" for t, c in best[:4])
                    )
                del case
            table.add(
                f"  {model.name} {name} {n} x {k}{' gated' if gated else ''}: "
                f"{floor:.2f}; {', '.join(figures)}"
            )


def gated_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Time the gated product of more rows than the small products take."""
    table.add("gated product with its activation, us: floor, kernel, library")
    for model in MODELS:
        entries = []
        for rows in GATED_ROWS:
            case = Gated(model, rows)
            took, library = attempt(lambda case=case: case.took(case.chosen)), case.library()
            table.add(
                f"  {model.name} rows {rows}: "
                f"{ceilings.floor(case.bytes, case.operations):.2f} {took:.2f} {library:.2f}"
            )
            if tune:
                tried = gated_configs(rows)
                best = sorted(
                    (attempt(lambda c=c, case=case: case.took(c)), dataclasses.astuple(c))
                    for c in tried
                )
                print("    " + "\n    ".join(f"{t:.2f} {c}" for t, c in best))
                table.add("    best: " + "; ".join(f"{t:.2f} {c}" for t, c in best[:4]))
                entries.append((rows, best[0][1] if best[0][0] < 0.98 * library else None))
            del case
        if tune:
            table.add(
                "    for kernels/products/gated/tuned_gated.py: "
                f"{(model.inner, model.hidden)}: {tuple(entries)},"
            )


def layers_section(table: Table, ceilings: Ceilings, tune: bool) -> dict[tuple[str, int], Configs]:
    """Time whole layers of a decode step, and return the best configurations by model and rows.

    The configurations of a layer's matrices are compared within the layer.
    """
    tuned: dict[tuple[str, int], Configs] = {}
    table.add(
        "a decode step's layer, us: floor, ours, with the library's products; all layers ms; "
        "what each kernel adds (its floor), and the rest"
    )
    for model, rows in itertools.product(MODELS, TUNED_ROWS):
        case = Layers(model, rows, 768)
        ours, library = case.time({}), case.time(dict.fromkeys(model.linears()))
        floors = {name: ceilings.floor(size) for name, size in case.bytes().items()}
        adds = {name: ours - case.time({}, name) for name in floors}
        parts = ", ".join(f"{name} {took:.1f} ({floors[name]:.1f})" for name, took in adds.items())
        table.add(
            f"  {model.name} rows {rows}: {sum(floors.values()):.2f} {ours:.2f} {library:.2f}; "
            f"{ours * model.layers / 1e3:.3f}; {parts}, rest {ours - sum(adds.values()):.1f}; "
            f"same with and without overlap: {case.agrees({})}"
        )
        if tune:
            tuned[model.name, rows] = tune_layer(table, case)
        del case
    return tuned


def small_kernels(model: Model, rows: int) -> dict[str, tuple[int, float]]:
    """Return the bytes and microseconds of each kernel between the products."""
    copies = max(2, min(40, math.ceil(L2_BYTES / (rows * model.hidden * 2))))
    xs = [torch.randn(rows, model.hidden, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
    weight = torch.ones(model.hidden, dtype=DTYPE, device=DEVICE)
    gates = [
        torch.randn(rows, 2 * model.inner, dtype=DTYPE, device=DEVICE)
        for _ in range(min(copies, 8))
    ]
    heads, size = model.heads + 2 * model.kv_heads, rows * model.hidden * 2
    cache = Paged(model, [rows], [1], 64, 1).caches[0]
    qkvs = [
        torch.randn(rows, heads * model.head_dim, dtype=DTYPE, device=DEVICE)
        for _ in range(min(copies, 8))
    ]
    slot_mapping = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    cos, sin = torch.randn(2, rows, model.head_dim // 2, device=DEVICE)
    norms = (torch.ones(model.head_dim, dtype=DTYPE, device=DEVICE),) * 2
    return {
        "rms_norm": (2 * size, microseconds([lambda x=x: rms_norm(x, weight, 1e-6) for x in xs])),
        "silu_mul": (
            6 * rows * model.inner,
            microseconds([lambda g=g: silu_mul(g) for g in gates]),
        ),
        "qkv_rope": (
            4 * qkvs[0].numel(),
            microseconds(
                [
                    lambda q=q: qkv_rope(
                        q,
                        slot_mapping,
                        slot_mapping,
                        Rope(cos, sin, norms, 1e-6),
                        cache,
                        model.heads,
                    )
                    for q in qkvs
                ]
            ),
        ),
    }


def small_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Time the kernels between the products."""
    table.add("small kernels, us: floor, kernel")
    for model, rows in itertools.product(MODELS, (1, 64, 256, 8192)):
        table.add(
            f"  {model.name} rows {rows}: "
            + ", ".join(
                f"{name} {ceilings.floor(n):.2f} {took:.2f}"
                for name, (n, took) in small_kernels(model, rows).items()
            )
        )


SECTIONS = {
    "decode": decode_section,
    "gated": gated_section,
    "layers": layers_section,
    "linear": linear_section,
    "prefill": prefill_section,
    "small": small_section,
}


@torch.inference_mode()
def main() -> None:
    """Run the sections and print their lines once more, together, at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--write", help="with --tune: kernels/products/tuned/tuned_products.py")
    options = parser.parse_args()
    sections = options.only.split(",")
    torch.manual_seed(0)
    if options.tune:
        compile_all(set(sections))
    ceilings, table = Ceilings(), Table()
    table.add(
        f"copy {ceilings.copy:.2f} TB/s, read {ceilings.read:.2f} TB/s, "
        f"product {ceilings.product:.0f} TFLOP/s"
    )
    for name in sections:
        begin = time.perf_counter()
        result = SECTIONS[name](table, ceilings, options.tune)
        if result is not None and options.write:
            write_products(options.write, result)
        print(f"{name}: {time.perf_counter() - begin:.0f} s")
        torch.cuda.empty_cache()
    print("\n" + "\n".join(table.lines))


if __name__ == "__main__":
    main()
