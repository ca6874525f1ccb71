"""Weights that count what a model reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.weights.weight_loader import DummyWeights


class CountingWeights(DummyWeights):
    """Random weights in float32 on the CPU, with the number of values read so far."""

    def __init__(self) -> None:
        super().__init__(0, torch.float32, torch.device("cpu"))
        self.count = 0

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return the tensor, and count its values."""
        tensor = super().get(name, shape, rows, columns)
        self.count += tensor.numel()
        return tensor
