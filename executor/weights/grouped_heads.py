"""Checkpoints that store the projections of a gated delta net by groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.weights.rearranged_weights import RearrangedWeights, StoredRows
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.recurrent_spec import DeltaSpec


class GroupedHeads(RearrangedWeights):
    """Weights of Qwen3-Next, under the names and in the order of Qwen3.5.

    Qwen3-Next stores what belongs to a key head together: in in_proj_qkvz its query, its key, its
    value heads' values and their gates, and in in_proj_ba its value heads' two inputs of the decay.
    Qwen3.5 stores all queries first, then all keys, and so on.
    """

    def __init__(self, weights: Weights, spec: DeltaSpec) -> None:
        """Read from `weights`."""
        super().__init__(weights)
        values = spec.num_value_heads // spec.num_key_heads
        keys, wide = spec.key_dim, values * spec.value_dim
        self._groups = spec.num_key_heads
        q, k, v, z = _split(self._groups, (keys, keys, wide, wide))
        b, a = _split(self._groups, (values, values))
        self._stored = {
            "in_proj_qkv": ("in_proj_qkvz", torch.cat([q, k, v])),
            "in_proj_z": ("in_proj_qkvz", z),
            "in_proj_b": ("in_proj_ba", b),
            "in_proj_a": ("in_proj_ba", a),
        }
        """By the name that a layer asks for: the stored name, and the rows in their order."""
        self._heights = {"in_proj_qkvz": 2 * (keys + wide), "in_proj_ba": 2 * values}
        """Rows of a group, by the stored name."""

    def place(self, name: str, rows: range, num_rows: int) -> StoredRows | None:
        """Return the groups that have the rows."""
        before, _, part = name.rpartition(".")
        if part not in self._stored:
            return None
        stored, order = self._stored[part]
        wanted, height = order[rows.start : rows.stop], self._heights[stored]
        first, last = int(wanted.min()) // height, int(wanted.max()) // height
        groups = range(first * height, (last + 1) * height)
        return StoredRows(
            f"{before}.{stored}", self._groups * height, groups, wanted - groups.start
        )


def _split(groups: int, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the stored rows of each part of all groups. widths: rows of a group's parts."""
    places = torch.arange(groups * sum(widths)).view(groups, -1)
    return tuple(part.flatten() for part in places.split(widths, 1))
