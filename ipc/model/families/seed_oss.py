"""Seed-OSS: like Llama, with biases of attention that config.json states one by one."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def seed_oss(config: HfConfig) -> ModelSpec:
    """Read a config.json of Seed-OSS."""
    attention = read_attention(config, output_bias=config.flag("attention_out_bias"))
    return decoder(config, alike(attention, read_mlp(config), read_windows(config)))
