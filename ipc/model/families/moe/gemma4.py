"""Gemma 4, text: heads of two shapes, keys as values, shared keys, vectors of tokens for layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_activation,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.gemma.gemma2 import read_softcap
from sidestep.ipc.model.families.gemma.gemma3 import NORMS
from sidestep.ipc.model.families.moe.experts_config import read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import (
    AttentionSpec,
    ExpertNames,
    ExpertNorms,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    RopeSpec,
    RoutingSpec,
    TokenInputSpec,
)
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import FULL, ROTATED, SLIDING, read_rope

_DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
"""Fields that a file may leave out."""
_UNIFIED_DEFAULTS = _DEFAULTS | {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES = {
    FULL: RopeSpec(theta=1e6, rope_type="proportional", scaling={"factor": 1.0, ROTATED: 0.25}),
    SLIDING: RopeSpec(theta=1e4),
}
"""The rotary embeddings, where the file has none."""
_BY_LAYER = "per_layer_config"
_GLOBAL_HEAD_DIM = 512
"""Size of the heads of full attention, where the file does not say."""


def gemma4(config: HfConfig) -> ModelSpec:
    """Read a config.json of Gemma 4's language model, alone or beside its other parts."""
    return _read(config, _DEFAULTS)


def gemma4_unified(config: HfConfig) -> ModelSpec:
    """Read the same of a model that takes images and sounds without encoders of their own."""
    return _read(config, _UNIFIED_DEFAULTS)


def _read(config: HfConfig, defaults: Mapping[str, Any]) -> ModelSpec:
    config.assume(defaults)
    # Between images alone, attention in both directions changes nothing for text.
    if (way := config.get("use_bidirectional_attention")) not in (None, "vision"):
        config.refuse(
            "use_bidirectional_attention", f"{way!r} is not supported; supported are null, 'vision'"
        )
    layers = _layers(config, _token_input(config))
    return decoder(
        config,
        layers,
        unused_weights=_unused_weights(layers),
        embedding_scale=config.whole("hidden_size") ** 0.5,
        logits_softcap=read_softcap(config, "final_logit_softcapping"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _token_input(config: HfConfig) -> TokenInputSpec | None:
    """Return the vectors that layers take of tokens, if they take any."""
    width = config.whole("hidden_size_per_layer_input", least=0)
    rows, vocab_size = config.whole("vocab_size_per_layer_input"), config.whole("vocab_size")
    if not width:
        return None
    if rows < vocab_size:
        config.refuse("vocab_size_per_layer_input", f"is {rows}, and vocab_size is {vocab_size}")
    return TokenInputSpec(width=width, vocab_size=rows, activation=read_activation(config))


def _layers(config: HfConfig, token_input: TokenInputSpec | None) -> list[LayerSpec]:
    windows = _windows(config)
    back = _kv_back(config, windows)
    mlp, doubled = _mlp(config), config.flag("use_double_wide_mlp")
    return [
        LayerSpec(
            mixer=msgspec.structs.replace(mixer, kv_back=layers_back),
            mlp=_wide(mlp) if doubled and layers_back else mlp,
            norms=NORMS,
            token_input=token_input,
            stored_factor=True,
        )
        for mixer, layers_back in zip(_mixers(config, windows), back, strict=True)
    ]


def _unused_weights(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return the beginnings of names of keys and values that files have and no layer reads."""
    return tuple(
        f"model.layers.{index}.self_attn.{one}"
        for index, layer in enumerate(layers)
        if isinstance(layer.mixer, AttentionSpec) and layer.mixer.kv_back
        for one in ("k_proj.", "v_proj.", "k_norm.")
    )


def _mlp(config: HfConfig) -> MlpSpec | ExpertsSpec:
    """Return the MLP, which stands beside the experts like a shared one if there are any."""
    mlp = read_mlp(config, bias=False)
    if not config.flag("enable_moe_block"):
        return mlp
    num_experts, num_chosen = config.whole("num_experts"), config.whole("top_k_experts")
    if num_chosen > num_experts:
        config.refuse("top_k_experts", f"is {num_chosen}, of {num_experts} experts")
    return read_experts(
        config,
        num_experts=num_experts,
        num_chosen=num_chosen,
        routing=RoutingSpec(normalised=True, norm=True, expert_scales=True),
        shared_width=mlp.width,
        norms=ExpertNorms(),
        names=ExpertNames(layer="", packed="", router="router.proj", shared="mlp"),
    )


def _wide(mlp: MlpSpec | ExpertsSpec) -> MlpSpec | ExpertsSpec:
    """Return the same, twice as wide but for experts."""
    if isinstance(mlp, ExpertsSpec):
        return msgspec.structs.replace(mlp, shared_width=2 * mlp.shared_width)
    return msgspec.structs.replace(mlp, width=2 * mlp.width)


def _windows(config: HfConfig) -> tuple[int, ...]:
    """Return the window of each layer. The last one has none, whatever the file says."""
    windows = read_windows(config, config.whole("sliding_window"), every=6)
    return (*windows[:-1], 0)


def _kv_back(config: HfConfig, windows: Sequence[int]) -> list[int]:
    """Return for each layer how far back the layer is whose keys it reads; 0 for its own."""
    shared = config.whole("num_kv_shared_layers", 0, least=0)
    first = len(windows) - shared
    if shared and not set(windows[first:]) <= set(windows[: max(first, 0)]):
        config.refuse(
            "num_kv_shared_layers", f"is {shared}, but no layer before these has keys of each kind"
        )
    back = [0] * first
    for layer in range(first, len(windows)):
        source = max(i for i in range(first) if windows[i] == windows[layer])
        back.append(layer - source)
    return back


def _mixers(config: HfConfig, windows: Sequence[int]) -> list[AttentionSpec]:
    """Return the attention of each layer, with keys of its own."""
    given = config.part("rope_parameters")
    rope, local_rope = (
        read_rope(config, layer_type=kind) if kind in given else _ROPES[kind]
        for kind in (FULL, SLIDING)
    )
    equal = config.flag("attention_k_eq_v")
    sizes = _sizes(config, windows)
    return [
        _mixer(config, window, local_rope if window else rope, own, equal and not window)
        for window, own in zip(windows, sizes, strict=True)
    ]


def _mixer(
    config: HfConfig, window: int, rope: RopeSpec, sizes: dict[str, int], keys_as_values: bool
) -> AttentionSpec:
    heads = config.whole("num_attention_heads")
    if heads % sizes["num_kv_heads"]:
        config.refuse(
            "num_attention_heads", f"is {heads}, no multiple of {sizes['num_kv_heads']} KV heads"
        )
    if sizes["head_dim"] % 2:
        config.refuse("head_dim", f"must be even, not {sizes['head_dim']}")
    return read_attention(
        config,
        window=window,
        rope=rope,
        head_norms=True,
        value_norms=True,
        keys_as_values=keys_as_values,
        given_scale=1.0,
        **sizes,
    )


def _sizes(config: HfConfig, windows: Sequence[int]) -> list[dict[str, int]]:
    """Return the size and the number of KV heads of each layer.

    transformers 5 writes those that differ by layer, and older files those of full attention.
    """
    plain = {
        "head_dim": config.whole("head_dim"),
        "num_kv_heads": config.whole("num_key_value_heads"),
    }
    if config.get(_BY_LAYER) is not None:
        given = config.part(_BY_LAYER)
        return [plain | _given_sizes(config, given.get(str(i), {})) for i in range(len(windows))]
    full = {**plain, "head_dim": config.whole("global_head_dim", _GLOBAL_HEAD_DIM)}
    kv_heads = config.whole("num_global_key_value_heads", plain["num_kv_heads"])
    if config.flag("attention_k_eq_v"):
        full["num_kv_heads"] = kv_heads
    return [plain if window else full for window in windows]


def _given_sizes(config: HfConfig, given: object) -> dict[str, int]:
    """Return what per_layer_config says of a layer."""
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    if not isinstance(given, dict) or not given.keys() <= names.keys():
        config.refuse(_BY_LAYER, f"may give a layer {', '.join(names)} alone, not {given!r}")
    for name, value in given.items():
        if type(value) is not int or value < 1:
            config.refuse(f"{name} of {_BY_LAYER}", f"must be a whole number, not {value!r}")
    return {names[name]: value for name, value in given.items()}
