"""Qwen3-Next: the decoder, from checkpoints that store projections by groups of heads."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.grouped_heads import GroupedHeads
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import recurrent_of
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """One rank's part of the model."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        """Build the layers from the grouped projections."""
        if recurrent := recurrent_of(spec.layers):
            weights = GroupedHeads(weights, recurrent[0])
        super().__init__(spec, weights, parallel, stage)
