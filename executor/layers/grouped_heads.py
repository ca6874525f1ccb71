"""Checkpoints that store the projections of a gated delta net by groups of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.layers.weight_loader import Shape, Weights
from sidestep.ipc.model.recurrent_spec import DeltaSpec


class GroupedHeads(Weights):
    """Weights of Qwen3-Next, under the names and in the order of Qwen3.5.

    Qwen3-Next stores what belongs to a key head together: in in_proj_qkvz its query, its key, its
    value heads' values and their gates, and in in_proj_ba its value heads' two inputs of the decay.
    Qwen3.5 stores all queries first, then all keys, and so on.
    """

    def __init__(self, weights: Weights, spec: DeltaSpec) -> None:
        """Read from `weights`."""
        super().__init__(weights.dtype, weights.device)
        self._weights = weights
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
        self._read: tuple[str, range, Tensor] | None = None
        """The last groups that were read: a layer asks for each of their parts by itself."""

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the tensor that a layer asks for, named <...>.<projection>.weight."""
        before, part, kind = name.rsplit(".", 2) if name.count(".") > 1 else ("", name, "")
        if part not in self._stored:
            return self._weights.get(name, shape, rows, columns)
        stored, order = self._stored[part]
        wanted = order if rows is None else order[rows.start : rows.stop]
        height = self._heights[stored]
        first, last = int(wanted.min()) // height, int(wanted.max()) // height
        groups = self._of_groups(
            f"{before}.{stored}.{kind}",
            (self._groups * height, *shape[1:]),
            range(first * height, (last + 1) * height),
        )
        return groups.index_select(0, (wanted - first * height).to(groups.device))

    def _of_groups(self, name: str, shape: Shape, rows: range) -> Tensor:
        """Return the rows of some groups."""
        if self._read is None or self._read[:2] != (name, rows):
            self._read = name, rows, self._weights.get(name, shape, rows=rows)
        return self._read[2]

    def exact(self, name: str, shape: Shape, rows: range | None = None) -> Tensor:
        """Return the named tensor in float32, from the checkpoint's own type."""
        return self._weights.exact(name, shape, rows)


def _split(groups: int, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the stored rows of each part of all groups. widths: rows of a group's parts."""
    places = torch.arange(groups * sum(widths)).view(groups, -1)
    return tuple(part.flatten() for part in places.split(widths, 1))
