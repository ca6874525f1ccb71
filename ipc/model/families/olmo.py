"""OLMo 2 and 3: each part's result is normed, its input is not; q and k of all heads are normed.

OLMo 3 has windows in three of four layers, and a rope for each of the kinds.
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
from sidestep.ipc.model.layer_spec import LayerNorms, LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import FULL, read_local_rope, read_rope

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


def olmo3(config: HfConfig) -> ModelSpec:
    """Read a config.json of OLMo 3."""
    windows = read_windows(config, config.whole("sliding_window", 4096), every=4)
    mlp = read_mlp(config)
    rope = read_rope(config, layer_type=FULL, theta=5e5)
    local_rope = read_local_rope(config, rope.theta)
    return decoder(
        config,
        [
            LayerSpec(
                mixer=read_attention(
                    config,
                    window=window,
                    rope=local_rope if window else rope,
                    row_norms=True,
                ),
                mlp=mlp,
                norms=NORMS,
            )
            for window in windows
        ],
    )
