"""Phi-3 and Phi-4: the decoder, from checkpoints with two fused matrices a layer."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.fused_weights import FusedWeights, gate_up
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_spec import ModelSpec


class Phi3ForCausalLM(DecoderForCausalLM):
    """One rank's part of the model."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: Parallel, stage: Stage | None = None
    ) -> None:
        """Build the layers from the fused matrices."""
        mixer = attention_of(spec.layers)[0]
        kv_rows = mixer.num_kv_heads * mixer.head_dim
        qkv = {"q_proj": mixer.num_heads * mixer.head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
        fused = FusedWeights(weights, {"qkv_proj": qkv, **gate_up(spec.layers[0].mlp.width)})
        super().__init__(spec, fused, parallel, stage)
