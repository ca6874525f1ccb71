"""Readers of config.json, one for each family of models: from its fields to a ModelSpec.

Each reader refuses fields that would change the model's arithmetic and are not implemented. A
reader must not import torch: the frontend calls it. A reader from another package
(`sidestep.model_specs`) can begin with the result of `llama`.
"""

from __future__ import annotations

from typing import Any

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import longest_positions, read_rope

TORCH_DTYPES = ("bfloat16", "float16", "float32")
FULL, SLIDING = "full_attention", "sliding_attention"


def llama(config: HfConfig) -> ModelSpec:
    """Read Llama 2 and 3, whose config.json has every field."""
    bias = config.flag("attention_bias")
    return _decoder(config, attention_bias=bias, attention_output_bias=bias)


def mistral(config: HfConfig) -> ModelSpec:
    """Read a model like Llama with a window, for all layers or for those in layer_types."""
    bias = config.flag("attention_bias")
    return _decoder(
        config,
        attention_bias=bias,
        attention_output_bias=bias,
        window=config.whole("sliding_window", 0, least=0),
    )


def qwen2(config: HfConfig) -> ModelSpec:
    """Read Qwen2: q, k and v alone have a bias, which config.json does not say."""
    return _decoder(config, attention_bias=True, **_qwen_window(config))


def qwen3(config: HfConfig) -> ModelSpec:
    """Read Qwen3: like Llama, with norms of queries and keys, which config.json does not say."""
    bias = config.flag("attention_bias")
    return _decoder(
        config,
        attention_bias=bias,
        attention_output_bias=bias,
        qk_norm=True,
        **_qwen_window(config),
    )


def _qwen_window(config: HfConfig) -> dict[str, Any]:
    if not config.flag("use_sliding_window"):
        return {}
    return {
        "window": config.whole("sliding_window", 0, least=0),
        "first_window": config.whole("max_window_layers", 0, least=0),
    }


def _decoder(
    config: HfConfig,
    *,
    attention_bias: bool,
    attention_output_bias: bool = False,
    qk_norm: bool = False,
    window: int = 0,
    first_window: int = 0,
) -> ModelSpec:
    """Return the ModelSpec of a decoder.

    window: attention window of the layers from `first_window` on, or of the layers that layer_types
    names.
    """
    _refuse_unsupported(config)
    num_layers, heads = config.whole("num_hidden_layers"), config.whole("num_attention_heads")
    hidden_size, rope = config.whole("hidden_size"), read_rope(config)
    return ModelSpec(
        path=config.path,
        architecture=config.architecture,
        dtype=_dtype(config),
        vocab_size=config.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.whole("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", hidden_size // heads),
        max_position_embeddings=longest_positions(config, rope),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_output_bias=attention_output_bias,
        mlp_bias=config.flag("mlp_bias"),
        qk_norm=qk_norm,
        windows=_windows(config, num_layers, window, first_window),
    )


def _refuse_unsupported(config: HfConfig) -> None:
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


def _dtype(config: HfConfig) -> str:
    older: Any = config.get("torch_dtype")  # always read: an override may use the older name
    name = str(config.get("dtype") or older or "float32").removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise EngineStartError(
            f"model: dtype {name!r} is not supported; supported are {', '.join(TORCH_DTYPES)}"
        )
    return name


def _windows(config: HfConfig, num_layers: int, window: int, first: int) -> tuple[int, ...]:
    """Return the window of each layer. As in transformers, layer_types alone gives no window."""
    kinds = config.names("layer_types")
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
