"""Qwen2: q, k and v alone have a bias, which config.json does not say."""

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


def qwen2(config: HfConfig) -> ModelSpec:
    """Read a config.json of Qwen2."""
    attention = read_attention(config, bias=True, output_bias=False)
    return decoder(config, alike(attention, read_mlp(config), qwen_windows(config)))


def qwen_windows(config: HfConfig) -> tuple[int, ...]:
    """Return the windows of the layers, which count only with use_sliding_window."""
    if not config.flag("use_sliding_window"):
        return read_windows(config)
    return read_windows(
        config,
        config.whole("sliding_window", 0, least=0),
        config.whole("max_window_layers", 0, least=0),
    )
