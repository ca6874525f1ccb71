"""GLM and GLM-4: the decoder, from checkpoints whose gate and up are one matrix."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.fused_weights import FusedWeights, gate_up
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec


class GlmForCausalLM(DecoderForCausalLM):
    """One rank's part of the model."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        """Build the layers from the fused matrices."""
        fused = FusedWeights(weights, gate_up(spec.layers[0].mlp.width))
        super().__init__(spec, fused, parallel, stage)
