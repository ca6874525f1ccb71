"""Qwen3-MoE: Qwen3's attention, and experts in some or all layers."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import decoder, read_attention, read_mlp
from sidestep.ipc.model.families.moe.experts_config import mixed, read_experts, read_sparse_layers
from sidestep.ipc.model.families.qwen2 import qwen_windows
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def qwen3_moe(config: HfConfig) -> ModelSpec:
    """Read a config.json of Qwen3-MoE."""
    layers = mixed(
        read_attention(config, head_norms=True),
        qwen_windows(config),
        read_experts(config),
        read_mlp(config),
        read_sparse_layers(config),
    )
    return decoder(config, layers)
