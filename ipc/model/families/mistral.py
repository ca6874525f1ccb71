"""Mistral and Ministral 3, alone or inside Mistral 3, which takes text alone here.

Mistral is like Llama with a window. Ministral 3 has YaRN, and queries that grow with their
positions.
"""

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
from sidestep.ipc.model.rope_config import read_rope


def mistral(config: HfConfig) -> ModelSpec:
    """Read a config.json of Mistral, with a window for all layers or for those in layer_types."""
    windows = read_windows(config, config.whole("sliding_window", 0, least=0))
    return decoder(config, alike(read_attention(config), read_mlp(config), windows))


def ministral3(config: HfConfig) -> ModelSpec:
    """Read a config.json of Ministral 3."""
    rope = read_rope(config, theta=1e6, scales_queries=True)
    attention = read_attention(config, rope=rope, bias=False, output_bias=False)
    windows = [config.whole("sliding_window", 0, least=0)] * config.whole("num_hidden_layers")
    return decoder(config, alike(attention, read_mlp(config), windows))


def mistral3(config: HfConfig) -> ModelSpec:
    """Read a config.json of Mistral 3, whose text_config says which of the two is inside."""
    readers = {"ministral3": ministral3, "mistral": mistral}
    kind = config.get("model_type")
    if kind not in readers:
        names = ", ".join(readers)
        config.refuse(
            "model_type of text_config", f"{kind!r} is not supported; supported are {names}"
        )
    return readers[kind](config)
