"""EXAONE 4: norms behind each part; layers without a window do not know positions (NoPE)."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.olmo import NORMS
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import read_rope


def exaone4(config: HfConfig) -> ModelSpec:
    """Read a config.json of EXAONE 4, whose smaller models have no windows."""
    window, rope, mlp = (
        config.whole("sliding_window", 0, least=0),
        read_rope(config),
        read_mlp(config),
    )
    every = config.whole("sliding_window_pattern", 4) if window else 0
    windows = read_windows(config, window, every=every)
    return decoder(
        config,
        [
            LayerSpec(
                mixer=read_attention(
                    config,
                    window=own,
                    rope=rope if own or not window else None,
                    head_norms=True,
                    bias=False,
                    output_bias=False,
                ),
                mlp=mlp,
                norms=NORMS,
            )
            for own in windows
        ],
    )
