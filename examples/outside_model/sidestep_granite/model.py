"""Granite's model class: the shared decoder, with the factors multiplied into the weights."""

from __future__ import annotations

import msgspec
from torch import Tensor

from sidestep.executor.layers.weight_loader import Shape, Weights
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec


class GraniteForCausalLM(DecoderForCausalLM):
    """One rank's part of the model.

    The head is no longer tied: its factor differs from the embedding's.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        untied = msgspec.structs.replace(spec, tie_word_embeddings=False)
        super().__init__(untied, ScaledWeights(spec, weights), parallel, stage)


class ScaledWeights(Weights):
    """The checkpoint's weights, each multiplied by its factor."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        super().__init__(weights.dtype, weights.device)
        self._weights = weights
        self._is_tied = spec.tie_word_embeddings
        residual = spec.extra["residual_multiplier"]
        self._factors = {
            "embed_tokens": spec.extra["embedding_multiplier"],
            # The decoder divides scores by the square root of a head's size.
            "q_proj": spec.extra["attention_multiplier"] / spec.layers[0].mixer.scale,
            "o_proj": residual,
            "down_proj": residual,
            "lm_head": 1 / spec.extra["logits_scaling"],
        }

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the tensor that the decoder asks for.

        Layers are named <...>.<layer>.weight or .bias.
        """
        factor = self._factors.get(name.split(".")[-2], 1.0)
        stored = "model.embed_tokens.weight" if name == "lm_head.weight" and self._is_tied else name
        return self._weights.get(stored, shape, rows, columns) * factor
