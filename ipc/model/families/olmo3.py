"""OLMo 3: like OLMo 2, with windows in three of four layers, and a rope for each of the kinds."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.olmo2 import NORMS
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import FULL, read_local_rope, read_rope


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
