"""Fields of config.json that most decoders have in the same words.

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
from sidestep.ipc.model.layer_spec import (
    USUAL_NORMS,
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LayerNorms,
    LayerSpec,
    MlpSpec,
    NormSpec,
    attention_of,
)
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import (
    FULL,
    SLIDING,
    longest_positions,
    read_head_dim,
    read_rope,
)

TORCH_DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Activations that MLPs have, by their names in config.json."""


def decoder(config: HfConfig, layers: Iterable[LayerSpec], **fields: Any) -> ModelSpec:
    """Return the ModelSpec of a decoder with these layers.

    fields: of ModelSpec, which replace what is read here.
    """
    refuse_unsupported(config)
    chosen = tuple(layers)
    rope = next((one.rope for one in attention_of(chosen) if one.rope is not None), None)
    read: dict[str, Any] = {
        "path": config.path,
        "architecture": config.architecture,
        "dtype": read_dtype(config),
        "vocab_size": config.whole("vocab_size"),
        "hidden_size": config.whole("hidden_size"),
        "layers": chosen,
        "max_position_embeddings": longest_positions(config, rope),
        "norm": NormSpec(eps=config.number("rms_norm_eps", 1e-6)),
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
        "head_dim": read_head_dim(config),
        "bias": bias,
        "output_bias": bias,
    }
    if "rope" not in fields:
        read["rope"] = read_rope(config)
    return AttentionSpec(**read | fields)


def read_mlp(config: HfConfig, **fields: Any) -> MlpSpec:
    """Return the MLP. fields: of MlpSpec, which replace what is read here."""
    read: dict[str, Any] = {
        "width": config.whole("intermediate_size"),
        "bias": config.flag("mlp_bias"),
        "activation": read_activation(config),
    }
    return MlpSpec(**read | fields)


def read_activation(config: HfConfig) -> Activation:
    """Return the activation of the gate, which Gemma's files name hidden_activation."""
    given = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    found = ACTIVATIONS.get(given) if isinstance(given, str) else None
    if found is None:
        raise EngineStartError(
            f"model: hidden_act {given!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    return found


def alike(
    attention: AttentionSpec,
    mlp: MlpSpec | ExpertsSpec,
    windows: Iterable[int],
    norms: LayerNorms = USUAL_NORMS,
) -> Iterator[LayerSpec]:
    """Yield layers that differ in their windows alone; 0 for full attention."""
    for window in windows:
        mixer = msgspec.structs.replace(attention, window=window)
        yield LayerSpec(mixer=mixer, mlp=mlp, norms=norms)


def refuse_unsupported(config: HfConfig) -> None:
    """Raise EngineStartError for a field that would change the arithmetic of any decoder."""
    if (value := config.get("pretraining_tp")) not in (None, 1):
        raise EngineStartError(f"model: pretraining_tp {value!r} is not supported; supported is 1")


def read_dtype(config: HfConfig) -> str:
    """Return the type that the checkpoint's weights have."""
    older: Any = config.get("torch_dtype")  # always read: an override may use the older name
    name = str(config.get("dtype") or older or "float32").removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise EngineStartError(
            f"model: dtype {name!r} is not supported; supported are {', '.join(TORCH_DTYPES)}"
        )
    return name


def read_windows(
    config: HfConfig, window: int = 0, first: int = 0, every: int = 0
) -> tuple[int, ...]:
    """Return the window of each layer. As in transformers, layer_types alone gives no window.

    window: of the layers that layer_types names. Without layer_types, the layers from `first` on
    have it, without each `every`-th layer.
    """
    num_layers, kinds = config.whole("num_hidden_layers"), config.names("layer_types")
    if every and not kinds:
        kinds = [SLIDING if layer % every else FULL for layer in range(1, num_layers + 1)]
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
