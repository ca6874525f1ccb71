"""Qwen3-Next: three of four layers are gated delta nets, and all have experts."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import read_mlp
from sidestep.ipc.model.families.moe.experts_config import read_sparse_layers
from sidestep.ipc.model.families.recurrent.recurrent_config import (
    read_shared_experts,
    recurrent_decoder,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def qwen3_next(config: HfConfig) -> ModelSpec:
    """Read a config.json of Qwen3-Next, in which some or all layers have experts."""
    dense = read_mlp(config)
    if config.whole("num_experts", 512, least=0) == 0:
        return recurrent_decoder(config, [dense] * config.whole("num_hidden_layers"))
    experts = read_shared_experts(config, normalised=config.flag("norm_topk_prob", True))
    sparse = read_sparse_layers(config)
    return recurrent_decoder(config, [experts if one else dense for one in sparse])
