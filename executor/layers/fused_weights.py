"""Checkpoints that store several matrices of a layer as one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sidestep.executor.layers.weight_loader import Shape, Weights


class FusedWeights(Weights):
    """Weights whose layers ask for matrices that are stored stacked, one below the other."""

    def __init__(self, weights: Weights, fused: Mapping[str, Mapping[str, int]]) -> None:
        """Read from `weights`. fused: by the stored name, the rows of each part by its name."""
        super().__init__(weights.dtype, weights.device)
        self._weights = weights
        self._stored: dict[str, tuple[str, int, int]] = {}
        """By a part's name: the stored name, the part's first row, and all rows."""
        for stored, parts in fused.items():
            first, total = 0, sum(parts.values())
            for part, rows in parts.items():
                self._stored[part] = stored, first, total
                first += rows

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the tensor that a layer asks for, named <...>.<part>.weight or .bias."""
        before, part, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", name, "")
        if part not in self._stored or columns is not None:
            return self._weights.get(name, shape, rows, columns)
        stored, first, total = self._stored[part]
        wanted = rows or range(shape[0])
        return self._weights.get(
            f"{before}.{stored}.{kind}",
            (total, *shape[1:]),
            rows=range(first + wanted.start, first + wanted.stop),
        )


def gate_up(width: int) -> dict[str, dict[str, int]]:
    """Return the matrix that holds a gate and an up projection of this width."""
    return {"gate_up_proj": {"gate_proj": width, "up_proj": width}}
