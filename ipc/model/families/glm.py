"""GLM and GLM-4, dense: neighbours of a head's first half are rotated, gate and up are one matrix.

GLM-4 norms each part's result as well as its input.
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
from sidestep.ipc.model.layer_spec import USUAL_NORMS, LayerNorms
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import read_rope

GLM4_NORMS = LayerNorms(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def glm(config: HfConfig, norms: LayerNorms = USUAL_NORMS) -> ModelSpec:
    """Read a config.json of GLM."""
    rope = read_rope(config, rotated=0.5, interleaved=True)
    attention = read_attention(config, rope=rope, output_bias=False)
    return decoder(config, alike(attention, read_mlp(config), read_windows(config), norms))


def glm4(config: HfConfig) -> ModelSpec:
    """Read a config.json of GLM-4."""
    return glm(config, GLM4_NORMS)
