"""Configurations of the GPU's kernels that gpu_kernels.py --tune tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.kernels.gpu_layers import Configs
from benchmarks.kernels.gpu_models import Model
from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.prefill_attention_triton import PrefillConfig
from sidestep.kernels.products import streamed_config
from sidestep.kernels.products.gated.gated_gemm_triton import GatedConfig
from sidestep.kernels.products.own_linear import Config
from sidestep.kernels.products.skinny_linear_triton import MAX_ROWS, SkinnyConfig
from sidestep.kernels.products.tuned.tuned_products import ROWS

TUNED_ROWS = ROWS
"""One number of rows of each class that kernels/products/tuned/tuned_products.py tells apart."""
SEVERAL_QUERIES = 5
"""Query tokens of a decode row that verifies four drafts."""


def decode_configs() -> Iterator[DecodeConfig]:
    """Yield configurations with tiles of 16, 32 and 64 keys."""
    for min_tiles in (1, 2, 4, 6):
        yield DecodeConfig(min_tiles=min_tiles, min_tiles_of_several=min_tiles)
    yield DecodeConfig(num_warps=4, min_tiles=4)
    yield DecodeConfig(tile=16, num_warps=1, programs_per_processor=8, min_tiles=4)
    yield DecodeConfig(tile=64, num_warps=4, num_stages=2, programs_per_processor=3)


def prefill_configs() -> Iterator[PrefillConfig]:
    """Yield configurations with the larger tiles, with bulk copies and without."""
    for rows, keys, warps, stages, registers in (
        (64, 64, 4, 3, None),
        (64, 64, 4, 2, None),
        (64, 64, 4, 3, 160),
        (128, 64, 8, 2, 128),
        (64, 64, 4, 4, None),
        (64, 64, 4, 2, 160),
    ):
        yield PrefillConfig(rows, keys, warps, stages, True, registers)
    yield PrefillConfig(64, 64, 4, 3, False)


def gemv_configs(inputs: int) -> Iterator[SkinnyConfig]:
    """Yield configurations for one row."""
    for block_n, block_k, warps in (
        (1, 512, 2),
        (1, 1024, 4),
        (1, 2048, 4),
        (1, 4096, 8),
        (2, 1024, 4),
        (2, 2048, 8),
        (4, 512, 4),
        (8, 512, 8),
    ):
        if block_k < 2 * inputs:
            yield SkinnyConfig(block_n, block_k, warps, False)


def skinny_configs() -> Iterator[SkinnyConfig]:
    """Yield configurations for 2 to 16 rows."""
    for block_n, block_k, warps in (
        (16, 512, 4),
        (16, 1024, 4),
        (16, 1024, 8),
        (16, 2048, 8),
        (32, 512, 4),
    ):
        yield SkinnyConfig(block_n, block_k, warps)


def product_configs(shape: tuple[int, int, bool], rows: int) -> list[Config]:
    """Return the configurations for a matrix with these outputs and inputs, gated or not."""
    if rows == 1:
        return list(gemv_configs(shape[1]))
    return [streamed_config.config(rows, *shape), *(skinny_configs() if rows <= MAX_ROWS else ())]


NORM_BEGUN_BY = {"qkv": "down", "gate_up": "o"}
"""Matrices that multiply a normed stream, with the product before each of them.

Their kernels differ by the number of programs of that product.
"""


def layer_configs(model: Model, rows: int) -> Iterator[Configs]:
    """Yield all configurations that tuning a layer may come to, as far as kernels differ."""
    linears = model.linears()
    for name, shape in linears.items():
        before: list[Configs] = [{}]
        if (beginner := NORM_BEGUN_BY.get(name)) is not None:
            by_block = {c.block_n: c for c in product_configs(linears[beginner], rows)}
            before = [{beginner: None}]
            before += [{beginner: c} for c in by_block.values()]
        for others, product in itertools.product(before, product_configs(shape, rows)):
            yield {**others, name: product}


GATED_ROWS = (32, 64, 128, 256, 512, 1024, 2048, 8192)
_GATED_TILES = {
    # The numbers are rows, columns of each half, step, warps, stages and programs.
    64: (
        (64, 64, 64, 4, 4, 2),
        (64, 128, 64, 4, 4),
        (64, 128, 64, 4, 5),
        (64, 64, 128, 4, 4),
        (64, 32, 64, 4, 4, 3),
    ),
    128: (
        (128, 128, 64, 8, 4),
        (128, 64, 64, 4, 3, 2),
        (64, 128, 64, 4, 5),
        (64, 64, 64, 4, 4, 2),
        (128, 64, 64, 8, 6),
        (128, 32, 64, 8, 4, 2),
    ),
    8192: (
        (256, 64, 64, 8, 4),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 3),
        (128, 64, 64, 4, 3, 2),
        (64, 64, 64, 4, 4, 2),
    ),
}


def gated_configs(rows: int) -> list[GatedConfig]:
    """Return the configurations that may be best for this number of rows."""
    by_rows = next(tiles for most, tiles in _GATED_TILES.items() if rows <= most)
    return [GatedConfig(*tile) for tile in by_rows]
