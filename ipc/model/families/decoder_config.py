"""What the config.json of most decoders says in the same words.

Each family's reader is a file beside this one and a line in ipc/common/registry.py. It refuses
fields that would change the model's arithmetic and are not implemented. A reader must not import
torch: the frontend calls it. A reader from another package (`sidestep.model_specs`) can begin with
the result of `llama`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import longest_positions, read_rope

TORCH_DTYPES = ("bfloat16", "float16", "float32")
FULL, SLIDING = "full_attention", "sliding_attention"


def decoder(config: HfConfig, layers: Iterable[LayerSpec], **fields: Any) -> ModelSpec:
    """Return the ModelSpec of a decoder with these layers.

    fields: of ModelSpec, which replace what is read here.
    """
    refuse_unsupported(config)
    read: dict[str, Any] = {
        "path": config.path,
        "architecture": config.architecture,
        "dtype": read_dtype(config),
        "vocab_size": config.whole("vocab_size"),
        "hidden_size": config.whole("hidden_size"),
        "layers": tuple(layers),
        "max_position_embeddings": longest_positions(config, read_rope(config)),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
    }
    return ModelSpec(**read | fields)


def read_attention(config: HfConfig, **fields: Any) -> AttentionSpec:
    """Return full attention as config.json describes it.

    fields: of AttentionSpec, which replace what is read here.
    """
    heads, bias = config.whole("num_attention_heads"), config.flag("attention_bias")
    read: dict[str, Any] = {
        "num_heads": heads,
        "num_kv_heads": config.whole("num_key_value_heads", heads),
        "head_dim": config.whole("head_dim", config.whole("hidden_size") // heads),
        "rope": read_rope(config),
        "bias": bias,
        "output_bias": bias,
    }
    return AttentionSpec(**read | fields)


def read_mlp(config: HfConfig, **fields: Any) -> MlpSpec:
    """Return the MLP. fields: of MlpSpec, which replace what is read here."""
    read: dict[str, Any] = {
        "width": config.whole("intermediate_size"),
        "bias": config.flag("mlp_bias"),
    }
    return MlpSpec(**read | fields)


def alike(attention: AttentionSpec, mlp: MlpSpec, windows: tuple[int, ...]) -> Iterator[LayerSpec]:
    """Yield layers that differ in their windows alone; 0 for full attention."""
    for window in windows:
        yield LayerSpec(mixer=msgspec.structs.replace(attention, window=window), mlp=mlp)


def refuse_unsupported(config: HfConfig) -> None:
    """Raise EngineStartError for a field that would change the arithmetic of any decoder."""
    if (activation := config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise EngineStartError(
            f"model: hidden_act {activation!r} is not supported; supported is silu"
        )
    if quantization := config.part("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise EngineStartError(
            f"model: quantization {method!r} is not supported; supported are unquantised weights"
        )
    for name in ("partial_rotary_factor", "pretraining_tp"):
        if (value := config.get(name)) not in (None, 1):
            raise EngineStartError(f"model: {name} {value!r} is not supported; supported is 1")


def read_dtype(config: HfConfig) -> str:
    """Return the type that the checkpoint's weights have."""
    older: Any = config.get("torch_dtype")  # always read: an override may use the older name
    name = str(config.get("dtype") or older or "float32").removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise EngineStartError(
            f"model: dtype {name!r} is not supported; supported are {', '.join(TORCH_DTYPES)}"
        )
    return name


def read_windows(config: HfConfig, window: int = 0, first: int = 0) -> tuple[int, ...]:
    """Return the window of each layer. As in transformers, layer_types alone gives no window.

    window: of the layers that layer_types names, or of those from `first` on.
    """
    num_layers, kinds = config.whole("num_hidden_layers"), config.names("layer_types")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise EngineStartError(
                f"model: layer type {kind!r} of layer_types in config.json is "
                f"not supported; supported are {FULL}, {SLIDING}"
            )
    if not kinds:
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(kinds) != num_layers:
        config.refuse(
            "layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {num_layers}"
        )
    return tuple(window if kind == SLIDING else 0 for kind in kinds)
