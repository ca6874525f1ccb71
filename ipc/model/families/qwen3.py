"""Qwen3: like Llama, with norms of queries and keys, which config.json does not say."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import alike, decoder, read_attention, read_mlp
from sidestep.ipc.model.families.qwen2 import qwen_windows
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec


def qwen3(config: HfConfig) -> ModelSpec:
    """Read a config.json of Qwen3."""
    attention = read_attention(config, head_norms=True)
    return decoder(config, alike(attention, read_mlp(config), qwen_windows(config)))
