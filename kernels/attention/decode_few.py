"""Launch of decode attention of few rows: its scratch memory, its plan and its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.attention.common.kv_codes_triton import CodedCache, parts_of
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.common.scores_triton import LOG2_E
from sidestep.kernels.attention.decode_config import FewConfig
from sidestep.kernels.attention.decode_few_gluon import _decode_few
from sidestep.kernels.attention.few_plan_triton import COLUMNS, plan_few
from sidestep.kernels.attention.few_sums_gluon import ABSENT
from sidestep.kernels.launch import num_processors, pdl

MOST_COMBINED = 32
"""The most parts of a row that a program adds up at once."""
_PARTS_OF_A_ROW = 4
"""Parts that each row of a step may have at least. With two, 32 long rows were 2% slower than by
the general kernel, which shares tiles out more evenly."""


class FewScratch:
    """Scratch memory of a launch; all of it is ABSENT between launches."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        config: FewConfig,
    ) -> None:
        self.config = config
        self.parts = max(1, num_processors(device) * config.programs_per_processor // num_kv_heads)
        group = num_heads // num_kv_heads
        # A program that adds parts up also reads places behind them.
        places = (self.parts + MOST_COMBINED) * num_kv_heads
        self.partial, self.stats = (
            torch.full(shape, ABSENT.value, dtype=torch.int32, device=device)
            for shape in ((places, group, head_dim), (places, group))
        )

    @property
    def most_rows(self) -> int:
        """The most rows of a step that are few."""
        return min(self.config.most_rows, self.parts // _PARTS_OF_A_ROW)

    def new_work(self, rows: int) -> Tensor:
        """Return memory for a plan of at most this many rows."""
        return self.partial.new_zeros(self.parts + rows, COLUMNS)

    def takes(self, rows: int, page: int) -> bool:
        """Return whether this many rows leave parts enough, and blocks have whole tiles."""
        return 2 * rows <= self.parts and page % self.config.tile == 0

    def plan(
        self,
        work: Tensor,
        tile_ends: Tensor,
        seq_lens: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        page: int,
        window: int,
    ) -> None:
        """List the programs' work: see plan_few. `slots` has the rows of the step alone."""
        plan_few(
            tile_ends,
            seq_lens,
            slots,
            block_tables,
            work,
            tile=self.config.tile,
            page=page,
            window=window,
            min_tiles=self.config.of(len(slots)).min_tiles,
        )


def decode_few(
    q: Tensor,
    cache: Tensor | CodedCache,
    block_tables: Tensor,
    work: Tensor,
    out: Tensor,
    scratch: FewScratch,
    *,
    num_heads: int,
    window: int,
    scale: float,
    rope: Rope,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """Compute what `decode_attention` does with a `rope`, for few rows.

    work: from plan_few, for the scratch's parts and tile. It has places for the rows of `out` that
    are decodes; `out` may have more rows.
    """
    _, twice_kv_heads, page, dim = cache.shape
    kv_heads = twice_kv_heads // 2
    group = num_heads // kv_heads
    rows = min(len(out), len(work) - scratch.parts)
    config = scratch.config.of(rows)
    assert rows > 0 and config.combined <= MOST_COMBINED
    memory, numbers, numbers_stride, code_format = parts_of(cache)
    words = memory.view(torch.int32) if code_format else memory
    _decode_few[(scratch.parts * kv_heads + rows * num_heads,)](
        q,
        memory,
        block_tables,
        work,
        out,
        scratch.partial,
        scratch.stats,
        rope.cos,
        rope.sin,
        *(rope.norms if rope.norms is not None else (q, q)),
        q.stride(0),
        block_tables.stride(0),
        cache.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        rope.eps,
        sinks,
        words,
        words.stride(0),
        numbers,
        numbers_stride,
        kv_scales,
        scratch.parts,
        kv_heads,
        group,
        dim,
        page,
        config.tile,
        config.stages,
        window,
        softcap,
        config.combined_of(scratch.parts, rows),
        rope.norms is not None,
        code_format,
        num_warps=config.num_warps,
        **pdl(q),
    )
