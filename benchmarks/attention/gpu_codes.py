"""Measure decode attention over keys and values of 8 and 4 bits beside 16 bits, by itself.

    python benchmarks/attention/gpu_codes.py [--formats model fp8 int8 int4]
        [--cases 8x65536 8x1024 1x1024 64x1024]

It prints microseconds for each configuration, and how many times as fast that is as the best time
with 16 bits. Results are checked against float64 over the numbers that the codes stand for.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels.gpu_attention import Decode
from benchmarks.kernels.gpu_compilation import in_processes
from benchmarks.kernels.gpu_models import MODELS, Model
from benchmarks.kernels.gpu_timing import L2_BYTES, Call, attempt
from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.decode_config import DecodeConfig, config_of
from sidestep.kernels.ops.kv_quantization import CodeFormat, dequantize, quantize

BITS = {"model": 16, "fp8": 8, "int8": 8, "int4": 4}
_OTHERS = (
    (32, 2, 3, 4),
    (32, 2, 5, 4),
    (32, 2, 3, 6),
    (32, 2, 4, 5),
    (32, 1, 4, 6),
    (32, 1, 3, 8),
    (64, 4, 3, 3),
    (64, 4, 3, 2),
    (64, 4, 4, 2),
    (64, 2, 3, 3),
    (64, 2, 2, 4),
)
"""Other configurations for codes of 8 bits: keys of a tile, warps, stages and programs."""


def configurations(model: Model, name: str) -> dict[str, DecodeConfig]:
    """Return configurations by name for a format; the shipped one is the first."""
    coded = BITS[name] == 8
    shipped = dataclasses.replace(
        config_of(model.head_dim, 2, model.heads, model.kv_heads, 1, bytes_of_codes=coded),
        few=None,
    )
    if not coded:
        return {
            "shipped": shipped,
            "4 stages": dataclasses.replace(shipped, num_stages=4),
            "6 programs": dataclasses.replace(shipped, programs_per_processor=6),
            "64 keys": dataclasses.replace(shipped, tile=64, num_warps=4, programs_per_processor=3),
        }
    return {"shipped": shipped} | {
        f"{tile} keys, {warps} warps, {stages} stages, {programs} programs": dataclasses.replace(
            shipped,
            tile=tile,
            num_warps=warps,
            num_stages=stages,
            programs_per_processor=programs,
            min_tiles=shipped.min_tiles * shipped.tile // tile,
        )
        for tile, warps, stages, programs in _OTHERS
    }


def coded(cache: Tensor, code_format: CodeFormat) -> CodedCache:
    """Return codes of a cache [blocks, 2 KVH, block size, D], which then has what they stand for.

    Codes and numbers of a block lie beside each other, as in the engine.
    """
    blocks, heads, page, dim = cache.shape
    count = 2 if code_format == "int4" else 1
    width = dim // 2 if code_format == "int4" else dim
    size = heads * page * width
    memory = torch.empty(
        blocks, size + heads * page * 2 * count, dtype=torch.uint8, device=cache.device
    )
    codes = memory[:, :size].unflatten(1, (heads, page, width))
    numbers = memory[:, size:].view(torch.float16).unflatten(1, (count, heads, page))
    for start in range(0, blocks, 256):
        part = cache[start : start + 256]
        # A byte of int4 has dimension i in its lower bits and i + D / 2 in the others.
        pairs = part.unflatten(-1, (2, dim // 2)).transpose(-1, -2).flatten(-2)
        x = pairs if code_format == "int4" else part
        made, read = quantize(x, code_format)
        values = dequantize(made, read, code_format)
        if code_format == "int4":
            values = values.unflatten(-1, (dim // 2, 2)).transpose(-1, -2).flatten(-2)
        codes[start : start + 256] = made.view(torch.uint8)
        numbers[start : start + 256] = read.permute(0, 3, 1, 2)
        cache[start : start + 256] = values.to(cache.dtype)
    return CodedCache(
        codes.view(torch.int8) if code_format == "int8" else codes,
        numbers if code_format == "int4" else numbers[:, 0],
        code_format,
    )


class CodedDecode(Decode):
    """Decode attention over codes."""

    def __init__(self, model: Model, lengths: list[int], name: str, copies: int = 0) -> None:
        size = sum(lengths) * 2 * model.kv_heads * model.head_dim * BITS[name] // 8
        super().__init__(model, lengths, copies=copies or math.ceil(L2_BYTES / size))
        self.bytes = size
        self.caches: list[Tensor | CodedCache] = list(self.batch.caches)
        if name != "model":
            self.caches = [coded(c, cast("CodeFormat", name)) for c in self.batch.caches]
            # The numbers of the first copy are what results are compared with.
            del self.batch.caches[1:]

    def calls(self, config: DecodeConfig) -> list[Call]:
        """Return one call for each copy of the cache."""
        kept, self.batch.caches = self.batch.caches, cast("list[Tensor]", self.caches)
        try:
            return super().calls(config)
        finally:
            self.batch.caches = kept


@torch.inference_mode()
def _compile(index: int, of: int, formats: list[str]) -> None:
    """Compile this process's share of the kernels for up to 16 rows, by running them."""
    torch.cuda.set_device(0)
    configs = [(name, c) for name in formats for c in configurations(MODELS[1], name).values()]
    for name, config in configs[index::of]:
        CodedDecode(MODELS[1], [70], name, copies=1).calls(config)[0]()


@torch.inference_mode()
def main() -> None:
    """Print a line for each case and configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=list(BITS))
    parser.add_argument("--cases", nargs="+", default=["8x65536", "8x1024", "1x1024", "64x1024"])
    args = parser.parse_args()
    in_processes(_compile, args.formats)
    torch.manual_seed(0)
    model = MODELS[1]
    for case in args.cases:
        rows, length = (int(word) for word in case.split("x"))
        plain = math.nan
        for name in args.formats:
            decode = CodedDecode(model, [length] * rows, name)
            times = {
                key: attempt(lambda c=config, d=decode: d.time(c))
                for key, config in configurations(model, name).items()
            }
            plain = min(times.values()) if name == "model" else plain
            print(
                f"{rows} x {length} {name}: "
                + "; ".join(f"{key} {t:.1f} ({plain / t:.2f})" for key, t in times.items()),
                flush=True,
            )
            del decode
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
