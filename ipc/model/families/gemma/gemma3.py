"""Gemma 3, text: windows in five of six layers, norms around each part, scaled embeddings."""

from __future__ import annotations

from sidestep.ipc.model.families.decoder_config import (
    decoder,
    read_attention,
    read_mlp,
    read_windows,
)
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import LayerNorms, LayerSpec, NormSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.rope_config import FULL, read_local_rope, read_rope

NORMS = LayerNorms(
    after_mixer="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
}
"""Fields that files of models with images leave out."""


def gemma3(config: HfConfig) -> ModelSpec:
    """Read a config.json of Gemma 3's language model, alone or beside its part for images."""
    config.assume(DEFAULTS)
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if config.get(name):
            config.refuse(name, "is not supported; supported is null")
    windows = read_windows(
        config,
        config.whole("sliding_window", 4096),
        every=config.whole("sliding_window_pattern", 6),
    )
    softcap = config.number("final_logit_softcapping", 0.0)
    return decoder(
        config,
        _layers(config, windows),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6), offset=1.0),
        embedding_scale=config.whole("hidden_size") ** 0.5,
        logits_softcap=softcap or None,
        tie_word_embeddings=config.flag("tie_word_embeddings", default=True),
    )


def _layers(config: HfConfig, windows: tuple[int, ...]) -> list[LayerSpec]:
    rope = read_rope(config, layer_type=FULL, theta=1e6)
    local_rope = read_local_rope(config, config.number("rope_local_base_freq", 1e4))
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    mlp = read_mlp(config)
    return [
        LayerSpec(
            mixer=read_attention(
                config,
                window=window,
                rope=local_rope if window else rope,
                head_norms=True,
                given_scale=scale,
            ),
            mlp=mlp,
            norms=NORMS,
        )
        for window in windows
    ]
