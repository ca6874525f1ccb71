"""Checkpoints that store several matrices of a layer as one."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.executor.weights.rearranged_weights import RearrangedWeights, StoredRows
from sidestep.executor.weights.weight_loader import Weights


class FusedWeights(RearrangedWeights):
    """Weights whose layers ask for matrices that are stored stacked, one below the other."""

    def __init__(self, weights: Weights, fused: Mapping[str, Mapping[str, int]]) -> None:
        """Read from `weights`. fused: by the stored name, the rows of each part by its name."""
        super().__init__(weights)
        self._stored: dict[str, tuple[str, int, int]] = {}
        """By a part's name: the stored name, the part's first row, and all rows."""
        for stored, parts in fused.items():
            first, total = 0, sum(parts.values())
            for part, rows in parts.items():
                self._stored[part] = stored, first, total
                first += rows

    def place(self, name: str, rows: range, num_rows: int) -> StoredRows | None:
        """Return the rows of the stacked matrix."""
        before, _, part = name.rpartition(".")
        if part not in self._stored:
            return None
        stored, first, total = self._stored[part]
        return StoredRows(f"{before}.{stored}", total, range(first + rows.start, first + rows.stop))


def gate_up(width: int) -> dict[str, dict[str, int]]:
    """Return the matrix that holds a gate and an up projection of this width."""
    return {"gate_up_proj": {"gate_proj": width, "up_proj": width}}
