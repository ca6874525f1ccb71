"""Configurations of decode attention, by the sizes of heads and the query tokens of a row."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class FewConfig:
    """Tile sizes and limits of decode attention of few rows (decode_few_gluon.py).

    benchmarks/attention/gpu_few_rows.py tries others.
    """

    tile: int = 32
    stages: int = 3
    """Tiles of keys and values that are on their way at once."""
    num_warps: int = 2
    programs_per_processor: int = 4
    min_tiles: int = 3
    combined: int = 16
    """Parts that a program adds up at once; half as many where rows have no more than that."""
    most_rows: int = 16
    """The most rows of a step that are few, where each of them may have enough parts."""
    alone: FewConfig | None = None
    """The configuration of a single row, with the same tiles and programs; None for this one."""

    def of(self, rows: int) -> FewConfig:
        """Return the configuration for this many rows."""
        return self if self.alone is None or rows > 1 else self.alone

    def combined_of(self, parts: int, rows: int) -> int:
        """Return how many parts are added up at once if `rows` rows share `parts` parts."""
        half = self.combined // 2
        return half if parts // rows <= half else self.combined


@dataclass(frozen=True)
class DecodeConfig:
    """Tile sizes and limits of decode attention, tuned by benchmarks/kernels/gpu_kernels.py."""

    tile: int = 32
    num_warps: int = 2
    num_stages: int = 3
    programs_per_processor: int = 4
    min_tiles: int = 2
    combined: int = 4096
    next_early: bool = False
    """Whether the next kernel may begin to load its weights while keys and values are loading."""
    read_once: bool = False
    """Whether L2 gives up keys and values before other lines. A step of a dense model is faster
    then, by up to 3% with 64 to 224 rows. One with experts, which stream by, is slower by 0.4%."""
    projections: bool = False
    """Whether a Hopper GPU's attention of many rows takes projections, and rotates them itself. A
    step of a dense model is faster then, by up to 1.4%. One with experts gains 0.3% with 48 rows,
    and loses 0.2% with 256."""
    min_tiles_of_several: int = 4
    """The least number of tiles of a program where rows have several query tokens: their parts are
    larger, and so take longer to combine."""
    few: FewConfig | None = None
    """The tiles of few rows that come as projections, where these have a kernel of their own."""

    def num_warps_of(self, query_rows: int, dim: int) -> int:
        """Return the warps of a program for these rows of queries, of `dim` padded dimensions.

        A thread accumulates 64 numbers at most, up to 8 warps.
        """
        return min(8, max(self.num_warps, query_rows * dim // 2048))


def decode_config(head_dim: int, itemsize: int, num_heads: int) -> DecodeConfig:
    """Return the configuration for a head size, the cache's item size and the query heads."""
    if head_dim > 256:
        return DecodeConfig(tile=16, num_warps=4, num_stages=2, programs_per_processor=2)
    if head_dim * itemsize > 512:
        return DecodeConfig(tile=32, num_warps=4, num_stages=2, programs_per_processor=2)
    if head_dim * itemsize > 256:
        return DecodeConfig(tile=32, num_warps=4, num_stages=3, programs_per_processor=2)
    # The wider the rest of a layer, the more a program may have to do before its start and end
    # count.
    wide = num_heads * head_dim >= _WIDE
    return DecodeConfig(min_tiles=4 if wide else 2, next_early=wide)


def config_of(
    head_dim: int,
    itemsize: int,
    num_heads: int,
    num_kv_heads: int,
    queries: int,
    *,
    bytes_of_codes: bool = False,
    coded_products: bool = False,
    experts: bool = False,
) -> DecodeConfig:
    """Return the configuration for rows of `queries` query tokens.

    bytes_of_codes: whether layers keep keys and values in codes of 8 bits, which take another
    kernel where it can. The others then take this configuration too. coded_products: whether the
    weights of the products before and behind attention are in codes. experts: whether layers have
    experts.
    """
    rows = queries * (num_heads // num_kv_heads)
    if queries > 1 and rows <= _FOUR_WARPS and head_dim * itemsize <= 256:
        if rows <= _ONE_WARP:
            # Small tiles of one warp spread the short rows of a small batch over all processors.
            return DecodeConfig(
                tile=16, num_warps=1, programs_per_processor=8, min_tiles_of_several=6
            )
        return DecodeConfig(
            tile=64, num_warps=4, programs_per_processor=2, min_tiles_of_several=1, combined=8192
        )
    config = decode_config(head_dim, itemsize, num_heads)
    # Tiles of codes are for two warps, which plain products would change.
    few = few_config(
        head_dim, itemsize, num_heads, num_kv_heads, coded=coded_products or bytes_of_codes
    )
    if bytes_of_codes and head_dim <= 128:
        config = replace(config, num_stages=_STAGES_OF_CODES)
        few = few and replace(few, stages=_STAGES_OF_CODES)
    return replace(config, few=few, read_once=not experts, projections=not experts)


def few_config(
    head_dim: int, itemsize: int, num_heads: int, num_kv_heads: int, *, coded: bool
) -> FewConfig | None:
    """Return the configuration of few rows, or None for heads that their kernel does not take.

    coded: whether weights, or keys and values, are in codes.
    """
    group = num_heads // num_kv_heads
    if itemsize != 2 or head_dim not in (64, 128, 256) or group > 16:
        return None
    stages = _STAGES[head_dim]
    if num_heads * head_dim < _WIDE:
        return FewConfig(min_tiles=2, stages=stages)
    alone = _BESIDE_PLAIN_PRODUCTS if group <= _SMALL_GROUP and not coded else None
    return FewConfig(alone=alone, stages=stages)


_STAGES = {64: 6, 128: 3, 256: 2}
"""Size of heads -> tiles on their way. Four programs share a processor's memory, or three of heads
of 256."""

_WIDE = 4096
"""Queries' dimensions of all heads from which on a layer is wide."""
_SMALL_GROUP = 4
_BESIDE_PLAIN_PRODUCTS = FewConfig(num_warps=4, stages=2)
"""For one row of Llama-3.1-8B with plain weights: whole steps are 1.5% faster than otherwise, and
2% slower with three stages. With weights in FP8 they are 7% slower."""
_STAGES_OF_CODES = 4
"""Tiles of codes in shared memory, which are half as large as those of numbers."""
_ONE_WARP, _FOUR_WARPS = 16, 32
"""Rows of queries of a KV head for which one warp, and four, have the registers."""
