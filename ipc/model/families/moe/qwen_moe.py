"""Qwen2-MoE and Qwen3-MoE: experts in some or all layers, in Qwen2 a shared one too."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.moe.experts_config import mixed, read_experts, read_sparse_layers
from sidestep.ipc.model.families.qwen2 import qwen_windows
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def qwen2_moe(config: HfConfig) -> ModelSpec:
    """Read a config.json of Qwen2-MoE. Windows count only with use_sliding_window."""
    window = 0
    if config.flag("use_sliding_window"):
        window = config.whole("sliding_window", 0, least=0)
        if window and not config.names("layer_types"):
            config.refuse("use_sliding_window", "needs layer_types, which names the layers")
    experts = read_experts(
        config,
        shared_width=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    layers = mixed(
        read_attention(config, bias=config.flag("qkv_bias", True), output_bias=False),
        read_windows(config, window),
        experts,
        read_mlp(config),
        read_sparse_layers(config),
    )
    return decoder(config, layers)


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
