"""Weights from memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sidestep.executor.weights.weight_loader import Shape, Weights


class GivenWeights(Weights):
    """The weights of a layer of transformers, in float32 on the CPU."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        """Hold these tensors. name: the beginning of the names that a layer asks for."""
        super().__init__(torch.float32, torch.device("cpu"))
        self._tensors = {f"{name}{one}": tensor for one, tensor in tensors.items()}

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the named tensor, or some of its rows or columns."""
        tensor = self._tensors[name]
        assert tuple(tensor.shape) == shape, name
        tensor = tensor if rows is None else tensor[rows.start : rows.stop]
        return tensor if columns is None else tensor[:, columns.start : columns.stop]
