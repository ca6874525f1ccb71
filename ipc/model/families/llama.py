"""Llama 2 and 3, whose config.json has every field."""

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


def llama(config: HfConfig) -> ModelSpec:
    """Read a config.json of Llama."""
    layers = alike(read_attention(config), read_mlp(config), read_windows(config))
    return decoder(config, layers)
