"""gpt-oss: experts with biases and an activation of their own; sinks, and windows in turns."""

from __future__ import annotations

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_windows,
)
from sidestep.ipc.model.families.moe.experts_config import read_experts
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import (
    MXFP4_BLOCK,
    ClampedSwiglu,
    ExpertNames,
    ExpertsSpec,
    RoutingSpec,
)
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec
from sidestep.ipc.model.read_quantization import stated_quantization
from sidestep.ipc.model.rope_config import read_rope

MXFP4 = "mxfp4"
"""The method by which the experts of the published checkpoints are quantized."""


def gpt_oss(config: HfConfig) -> ModelSpec:
    """Read a config.json of gpt-oss."""
    if not config.part("rope_parameters"):
        config.refuse("rope_parameters", "is missing")
    bias = config.flag("attention_bias", default=True)
    attention = read_attention(
        config, rope=read_rope(config, theta=1.5e5), sinks=True, bias=bias, output_bias=bias
    )
    windows = read_windows(config, config.whole("sliding_window", 128), every=2)
    layers = alike(attention, _experts(config), windows)
    return decoder(config, layers, quantization=_quantization(config))


def _quantization(config: HfConfig) -> QuantizationSpec | None:
    """Return the quantization of the experts; None for plain ones.

    Raises EngineStartError for another method.
    """
    stated = stated_quantization(config)
    if stated is None:
        return None
    if stated.method != MXFP4:
        raise EngineStartError(
            f"model: quantization {stated.method!r} is not supported for {config.architecture}; "
            f"supported are plain weights and {MXFP4}"
        )
    return QuantizationSpec(method=MXFP4)


def _experts(config: HfConfig) -> ExpertsSpec:
    """Return the experts. Raises EngineStartError for sizes that blocks do not divide."""
    packed = _quantization(config) is not None
    for name in ("hidden_size", "intermediate_size"):
        if packed and config.whole(name) % MXFP4_BLOCK:
            config.refuse(name, f"must be a multiple of {MXFP4_BLOCK} for {MXFP4}")
    return read_experts(
        config,
        width=config.whole("intermediate_size"),
        activation=ClampedSwiglu(
            alpha=config.number("swiglu_alpha", 1.702), limit=config.number("swiglu_limit", 7.0)
        ),
        bias=True,
        stored="mxfp4" if packed else "interleaved",
        routing=RoutingSpec(normalised=True, product_bias=True),
        names=ExpertNames(router="router"),
    )
