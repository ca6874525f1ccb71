"""Phi-3 and Phi-4: like Llama with a window; q, k and v are one matrix, and so are gate and up."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import alike, decoder, read_attention, read_mlp
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import read_rope


def phi3(config: HfConfig) -> ModelSpec:
    """Read a config.json of Phi-3 or Phi-4."""
    attention = read_attention(config, rope=read_rope(config, rotated=1.0))
    windows = [config.whole("sliding_window", 0, least=0)] * config.whole("num_hidden_layers")
    return decoder(config, alike(attention, read_mlp(config), windows))
