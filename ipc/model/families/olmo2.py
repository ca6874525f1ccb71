"""OLMo 2: each part's result is normed, its input is not; q and k of all heads are normed."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import LayerNorms
from sidestep.ipc.model.model_spec import ModelSpec

NORMS = LayerNorms(
    before_mixer="",
    after_mixer="post_attention_layernorm",
    before_mlp="",
    after_mlp="post_feedforward_layernorm",
)


def olmo2(config: HfConfig) -> ModelSpec:
    """Read a config.json of OLMo 2."""
    attention = read_attention(config, row_norms=True)
    return decoder(config, alike(attention, read_mlp(config), read_windows(config), NORMS))
