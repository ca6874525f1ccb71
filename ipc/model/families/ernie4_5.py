"""ERNIE 4.5, dense: like Llama, with neighbours rotated, and biases in all products or in none."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import NormSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import read_rope


def ernie4_5(config: HfConfig) -> ModelSpec:
    """Read a config.json of ERNIE 4.5."""
    bias, rope = config.flag("use_bias"), read_rope(config, theta=500000.0, interleaved=True)
    attention = read_attention(config, rope=rope, bias=bias, output_bias=bias)
    return decoder(
        config,
        alike(attention, read_mlp(config, bias=bias), read_windows(config)),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-5)),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=True),
    )
