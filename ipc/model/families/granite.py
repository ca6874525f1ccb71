"""Granite: like Llama, with factors on embeddings, scores, each part's result, and logits.

The stream is kept divided by the residual multiplier. So the parts' results are added as they are,
and no weight is scaled. A norm of the stream does not change but for its eps.
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
from sidestep.ipc.model.layer_spec import NormSpec
from sidestep.ipc.model.model_spec import ModelSpec


def granite(config: HfConfig) -> ModelSpec:
    """Read a config.json of Granite."""
    residual = _positive(config, "residual_multiplier")
    attention = read_attention(config, given_scale=config.number("attention_multiplier", 1.0))
    return decoder(
        config,
        alike(attention, read_mlp(config), read_windows(config)),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6) / residual**2),
        embedding_scale=config.number("embedding_multiplier", 1.0) / residual,
        logits_scale=1 / _positive(config, "logits_scaling"),
    )


def _positive(config: HfConfig, name: str) -> float:
    """Return a factor that others are divided by; 1 if it is missing."""
    value = config.number(name, 1.0)
    if value <= 0:
        config.refuse(name, f"must be above 0, not {value!r}")
    return value
