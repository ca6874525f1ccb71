"""Checkpoints that have each matrix of a layer's experts in one tensor, as transformers 5 has them.

In the layer's `mlp.experts`, for most families, `gate_up_proj` [E, 2 F, D] has each expert's gate
over its other matrix, and `down_proj` is [E, D, F]. Layers ask for the matrices one by one, and for
a rank's part of them, so no more than that part is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sidestep.executor.layers.experts.separate_experts import matrix_names
from sidestep.executor.weights.weight_loader import CheckpointWeights, Part
from sidestep.ipc.model.layer_spec import ExpertsSpec


def unpack_experts(
    weights: CheckpointWeights, name: str, spec: ExpertsSpec, hidden_size: int
) -> None:
    """Give the matrices of a layer's experts their own names, if the checkpoint has them packed.

    name: the beginning of the names of the layer's weights.
    """
    place = f"{name}.{spec.names.packed}" if spec.names.packed else name
    packed = f"{place}.experts"
    if f"{packed}.gate_up_proj" not in weights:
        return
    width, own = spec.width, spec.names.place(name)
    gate_up = (spec.num_experts, 2 * width, hidden_size)
    down = (spec.num_experts, hidden_size, width)
    for expert in range(spec.num_experts):
        for one, (stack, shape, rows) in zip(
            matrix_names(spec, own, expert),
            (
                ("gate_up_proj", gate_up, range(width)),
                ("gate_up_proj", gate_up, range(width, 2 * width)),
                ("down_proj", down, range(hidden_size)),
            ),
            strict=True,
        ):
            weights.view(
                f"{one}.weight", Matrix(weights.part(f"{packed}.{stack}", shape), expert, rows)
            )
    if own != place:
        weights.alias(f"{own}.gate.weight", f"{place}.gate.weight")


class Matrix:
    """Some rows of one of the matrices that a file has as one tensor [E, R, C]."""

    def __init__(self, stack: Part, index: int, rows: range) -> None:
        self._stack, self._index, self._rows = stack, index, rows

    def get_shape(self) -> Sequence[int]:
        """Return the shape of these rows."""
        return len(self._rows), self._stack.get_shape()[2]

    def __getitem__(self, index: Any) -> Tensor:
        """Return the elements that a slice of rows, or slices of rows and columns, select."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        first, stop, _ = rows.indices(len(self._rows))
        start = self._rows.start
        return self._stack[self._index, start + first : start + stop, columns]
