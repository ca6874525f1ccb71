"""Gemma 2: windows in every second layer, norms around each part, bounded scores and logits."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    alike,
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.families.gemma.gemma3 import NORMS
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import NormSpec
from sidestep.ipc.model.model_spec import ModelSpec


def gemma2(config: HfConfig) -> ModelSpec:
    """Read a config.json of Gemma 2."""
    if config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", "is not supported; supported is null")
    attention = read_attention(
        config,
        given_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        score_softcap=read_softcap(config, "attn_logit_softcapping"),
    )
    windows = read_windows(config, config.whole("sliding_window", 4096), every=2)
    return decoder(
        config,
        alike(attention, read_mlp(config), windows, NORMS),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6), offset=1.0),
        embedding_scale=config.whole("hidden_size") ** 0.5,
        logits_softcap=read_softcap(config, "final_logit_softcapping"),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def read_softcap(config: HfConfig, name: str) -> float | None:
    """Return a bound of scores or logits; None if the file has null or 0."""
    return config.number(name, 0.0) or None
