"""SmolLM3: like Llama, but every fourth layer does not know positions (NoPE)."""

from __future__ import annotations

import msgspec

from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec


def smollm3(config: HfConfig) -> ModelSpec:
    """Read a config.json of SmolLM3."""
    window = config.whole("sliding_window", 0, least=0)
    windows = read_windows(config, window if config.flag("use_sliding_window") else 0)
    layers = alike(read_attention(config), read_mlp(config), windows)
    rotates = _layers_with_rope(config, len(windows))
    return decoder(
        config,
        [
            layer if has else _without_rope(layer)
            for layer, has in zip(layers, rotates, strict=True)
        ],
    )


def _without_rope(layer: LayerSpec) -> LayerSpec:
    mixer = msgspec.structs.replace(layer.mixer, rope=None)
    return msgspec.structs.replace(layer, mixer=mixer)


def _layers_with_rope(config: HfConfig, num_layers: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding."""
    interval = config.whole("no_rope_layer_interval", 4)
    stated = config.get("no_rope_layers")
    if stated is None:
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(stated, list) or len(stated) != num_layers:
        config.refuse(
            "no_rope_layers", f"must be a list with a number for each of {num_layers} layers"
        )
    return [bool(has) for has in stated]
