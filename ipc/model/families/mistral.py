"""Mistral: like Llama with a window, for all layers or for those in layer_types."""

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


def mistral(config: HfConfig) -> ModelSpec:
    """Read a config.json of Mistral."""
    windows = read_windows(config, config.whole("sliding_window", 0, least=0))
    return decoder(config, alike(read_attention(config), read_mlp(config), windows))
