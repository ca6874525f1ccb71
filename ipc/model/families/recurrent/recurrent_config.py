"""Read what config.json says of models whose layers are attention or gated delta nets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.families.decoder_config import decoder, read_activation, read_attention
from sidestep.ipc.model.families.moe.experts_config import read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import (
    AttentionSpec,
    ExpertsSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RoutingSpec,
)
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.ipc.model.rope_config import FULL, read_rope

RECURRENT = "linear_attention"
"""Type of layers, beside full attention."""
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")
"""Fields that say which pairs turn by which of an image's positions. A text has one position."""
UNUSED = ("mtp.", "model.visual.")
"""Weights of a checkpoint that predict further tokens, and that read images."""


def read_delta(config: HfConfig) -> DeltaSpec:
    """Return the recurrent layers as config.json describes them."""
    keys, values = (
        config.whole("linear_num_key_heads", 16),
        config.whole("linear_num_value_heads", 32),
    )
    if values % keys:
        config.refuse("linear_num_value_heads", f"is {values}, no multiple of {keys} key heads")
    if read_activation(config) != "silu":
        config.refuse("hidden_act", "must be silu for recurrent layers")
    return DeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.whole("linear_key_head_dim", 128),
        value_dim=config.whole("linear_value_head_dim", 128),
        conv_kernel=config.whole("linear_conv_kernel_dim", 4, least=2),
    )


def read_gated_attention(config: HfConfig) -> AttentionSpec:
    """Return the attention of the other layers, with gates and norms of heads."""
    rope = read_rope(config, rotated=0.25, ignored=_IMAGE_ROPE)
    return read_attention(config, rope=rope, head_norms=True, gate=True)


def read_shared_experts(config: HfConfig, *, normalised: bool) -> ExpertsSpec:
    """Return experts, and a shared one with a gate. normalised: see RoutingSpec."""
    return read_experts(
        config,
        routing=RoutingSpec(normalised=normalised),
        shared_width=config.whole("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def read_recurrent(config: HfConfig) -> list[bool]:
    """Return for each layer whether it is recurrent: layer_types, or full_attention_interval."""
    num_layers, kinds = config.whole("num_hidden_layers"), config.names("layer_types")
    if not kinds:
        every = config.whole("full_attention_interval", 4)
        return [layer % every != 0 for layer in range(1, num_layers + 1)]
    for kind in kinds:
        if kind not in (FULL, RECURRENT):
            raise EngineStartError(
                f"model: layer type {kind!r} of layer_types in config.json is not supported; "
                f"supported are {FULL}, {RECURRENT}"
            )
    if len(kinds) != num_layers:
        config.refuse(
            "layer_types", f"names {len(kinds)} layers, and num_hidden_layers is {num_layers}"
        )
    if FULL not in kinds:
        config.refuse("layer_types", f"must name {FULL} at least once")
    return [kind == RECURRENT for kind in kinds]


def recurrent_decoder(
    config: HfConfig, mlps: Iterable[MlpSpec | ExpertsSpec], **fields: Any
) -> ModelSpec:
    """Return the ModelSpec of a decoder whose layers have these MLPs or experts.

    fields: of ModelSpec, which replace what is read here.
    """
    norm = NormSpec(eps=config.number("rms_norm_eps", 1e-6), offset=1.0)
    return decoder(config, _layers(config, mlps), norm=norm, unused_weights=UNUSED, **fields)


def _layers(config: HfConfig, mlps: Iterable[MlpSpec | ExpertsSpec]) -> Iterator[LayerSpec]:
    attention, delta = read_gated_attention(config), read_delta(config)
    for is_recurrent, mlp in zip(read_recurrent(config), mlps, strict=True):
        yield LayerSpec(mixer=delta if is_recurrent else attention, mlp=mlp)
