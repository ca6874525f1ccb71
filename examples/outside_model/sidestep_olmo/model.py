"""OLMo's model class: the shared decoder, whose residual stream has a mean of zero.

A LayerNorm without weights subtracts the mean of a row, and is then an RMSNorm whose weights are
one. Here the mean is subtracted from the weights of all that adds to the stream, when they are
loaded. (SliceGPT, Ashkboos et al. 2024, does the same.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Shape, Weights
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec


class OlmoForCausalLM(DecoderForCausalLM):
    """One rank's part of the model."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        super().__init__(spec, CentredWeights(weights), parallel, stage)


class CentredWeights(Weights):
    """The checkpoint's weights, and those that the decoder needs beside them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights.dtype, weights.device)
        self._weights = weights

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the tensor that the decoder asks for, named <...>.<layer>.weight or .bias."""
        layer = name.split(".")[-2]
        if layer.endswith("norm"):  # the checkpoint has none
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        tensor = self._weights.get(name, shape, rows, columns)
        if layer == "embed_tokens":  # a tied head may have it too: its input's mean is zero
            return tensor - tensor.mean(1, keepdim=True)
        if layer in ("o_proj", "down_proj"):
            return tensor - tensor.mean(0, keepdim=True)
        return tensor
