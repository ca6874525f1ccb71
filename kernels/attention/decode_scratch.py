"""Scratch memory of decode attention."""

from __future__ import annotations

import copy

import torch

from sidestep.kernels.attention.decode_config import DecodeConfig
from sidestep.kernels.attention.decode_few import FewScratch
from sidestep.kernels.attention.hopper.decode_hopper import TILE, HopperScratch
from sidestep.kernels.launch import has_pdl, next_power_of_2, num_processors

MOST_QUERIES = 8
"""The most query tokens of a row."""


class DecodeScratch:
    """Scratch memory of a launch; the counters are zero between launches.

    queries: the most query tokens of a row in any launch. Launches of fewer share the memory.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_rows: int,
        device: torch.device,
        config: DecodeConfig,
        queries: int = 1,
    ) -> None:
        assert 1 <= queries <= MOST_QUERIES
        self.config, self.queries = config, queries
        self.parts = max(1, num_processors(device) * config.programs_per_processor // num_kv_heads)
        group = next_power_of_2(num_heads // num_kv_heads * queries)
        # Each program has two parts: of the row it begins within, and of the row it ends within.
        slots = self.parts * num_kv_heads * 2
        self.partial = torch.empty(slots, group, max(16, next_power_of_2(head_dim)), device=device)
        self.stats = torch.empty(slots, 2, group, device=device)
        self.counters = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        self.memory = self.partial, self.stats, self.counters
        self.hopper: HopperScratch | None = None
        self.few: FewScratch | None = None
        if queries > 1:
            return
        heads = num_heads, num_kv_heads, head_dim
        if config.tile == TILE:
            self.hopper = HopperScratch.of(*heads, device)
        if config.few is not None and has_pdl(device):
            self.few = FewScratch(*heads, device, config.few)

    def on(self, processors: int) -> DecodeScratch:
        """Return the same memory for launches on fewer processors, by the kernel for Hopper."""
        part = copy.copy(self)
        assert self.hopper is not None
        part.hopper = self.hopper.on(processors)
        return part
