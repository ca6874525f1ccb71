"""Memory for programs that share a tile's columns: their partial sums, and who has arrived."""

from __future__ import annotations

import functools

import torch

MOST_TILES = 8192
MOST_PARTIALS = 1 << 22
"""Largest number of float32 sums that programs which share columns leave for one another."""


class Workspace:
    """Partial sums, and counters of tiles that are zero between kernels."""

    def __init__(self, device: torch.device) -> None:
        self.partials = torch.empty(MOST_PARTIALS, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


workspace_of = functools.cache(Workspace)
"""The workspace of a device. There is one for all kernels, since they follow one another."""
