"""Qwen3.5 and Qwen3.6, their language models: as Qwen3-Next, dense or with experts in all layers.

Their checkpoints may also read images; text has one position, so that the rotary embedding is the
plain one.
"""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import read_mlp
from sidestep.ipc.model.families.recurrent.recurrent_config import (
    read_shared_experts,
    recurrent_decoder,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def qwen3_5(config: HfConfig) -> ModelSpec:
    """Read a config.json of a dense Qwen3.5."""
    return recurrent_decoder(config, [read_mlp(config)] * config.whole("num_hidden_layers"))


def qwen3_5_moe(config: HfConfig) -> ModelSpec:
    """Read a config.json of a Qwen3.5 with experts."""
    experts = read_shared_experts(config, normalised=True)
    return recurrent_decoder(config, [experts] * config.whole("num_hidden_layers"))
