"""Small random models of every family, and the tokens that transformers generates with them.

transformers writes the models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

RandomModel = Callable[[str], tuple[str, PreTrainedModel]]
"""A function that returns a family's model: its folder, and the model in transformers."""

COMMON: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


_RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
"""Three recurrent layers and one with attention."""


def _of(kind: Callable[..., PretrainedConfig], **changes: Any) -> PretrainedConfig:
    return kind(**{**COMMON, **changes})


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": kind, **values}


_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": rope("default"),
        "full_attention": rope("proportional", partial_rotary_factor=0.5),
    },
}
"""Heads of two shapes."""


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-gqa": lambda: _of(LlamaConfig),
    "llama-mha-tied": lambda: _of(LlamaConfig, num_key_value_heads=4, tie_word_embeddings=True),
    "llama-mqa-odd-sizes": lambda: _of(
        LlamaConfig,
        num_key_value_heads=1,
        hidden_size=60,
        head_dim=20,
        num_attention_heads=6,
        intermediate_size=94,
        vocab_size=257,
    ),
    "llama-biases": lambda: _of(LlamaConfig, attention_bias=True, mlp_bias=True),
    "llama-rope-linear": lambda: _of(LlamaConfig, rope_parameters=rope("linear", factor=4.0)),
    "llama-rope-llama3": lambda: _of(
        LlamaConfig,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-rope-yarn": lambda: _of(
        LlamaConfig, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)
    ),
    "mistral-window": lambda: _of(MistralConfig, sliding_window=24, head_dim=12),
    "ministral3": lambda: _of(
        Ministral3Config,
        head_dim=16,
        rope_parameters=rope(
            "yarn",
            factor=16.0,
            original_max_position_embeddings=16,
            max_position_embeddings=512,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.4,
        ),
    ),
    "qwen2": lambda: _of(Qwen2Config),
    "qwen2-window": lambda: _of(
        Qwen2Config, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "ernie4.5": lambda: _of(Ernie4_5Config, head_dim=16, use_bias=True),
    "exaone4": lambda: _of(Exaone4Config, head_dim=12, sliding_window=16, sliding_window_pattern=3),
    "exaone4-no-windows": lambda: _of(
        Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "gemma2": lambda: _of(
        Gemma2Config,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
    ),
    "gemma3": lambda: _of(
        Gemma3TextConfig,
        head_dim=16,
        sliding_window=16,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]
        + ["sliding_attention"],
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
        final_logit_softcapping=30.0,
        rope_parameters={
            "sliding_attention": rope("default"),
            "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma4": lambda: _of(
        Gemma4TextConfig,
        **{
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"]
            + ["sliding_attention"] * 3
            + ["full_attention"],
        },
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    ),
    "gemma4-token-inputs": lambda: _of(
        Gemma4TextConfig,
        **{
            **_GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2
            + ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 12,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4-moe": lambda: _of(
        Gemma4TextConfig,
        **_GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "gemma4-unified": lambda: _of(
        Gemma4UnifiedTextConfig,
        **{name: value for name, value in _GEMMA4.items() if "per_layer" not in name},
        attention_bias=True,
    ),
    "glm": lambda: _of(GlmConfig, head_dim=16, attention_bias=True),
    "glm4": lambda: _of(Glm4Config, head_dim=24, partial_rotary_factor=0.5),
    "glm4-moe": lambda: _of(
        Glm4MoeConfig,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "gpt-oss": lambda: _of(
        GptOssConfig,
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        sliding_window=16,
        num_local_experts=6,
        num_experts_per_tok=2,
        swiglu_limit=2.0,
        rope_parameters=rope(
            "yarn",
            factor=4.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=128,
        ),
    ),
    "granite-tied": lambda: _of(
        GraniteConfig,
        tie_word_embeddings=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.11,
        logits_scaling=2.5,
    ),
    "olmo2": lambda: _of(Olmo2Config),
    "olmo3": lambda: _of(Olmo3Config, sliding_window=16, num_hidden_layers=4),
    "phi3-window": lambda: _of(Phi3Config, sliding_window=24),
    "phi4-longrope": lambda: _of(
        Phi3Config,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=512,  # as many as an engine has: the list for short texts
        rope_parameters=rope(
            "longrope",
            attention_factor=1.2,
            short_factor=[1.0, 1.1, 1.3],
            long_factor=[1.0, 2.0, 4.5],
            partial_rotary_factor=0.5,
        ),
    ),
    "mixtral": lambda: _of(
        MixtralConfig, num_local_experts=5, num_experts_per_tok=2, sliding_window=24
    ),
    "olmoe": lambda: _of(OlmoeConfig, num_experts=6, num_experts_per_tok=3, intermediate_size=40),
    "qwen2-moe": lambda: _of(
        Qwen2MoeConfig,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "qwen3-moe": lambda: _of(
        Qwen3MoeConfig,
        head_dim=16,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=36,
        norm_topk_prob=True,
        num_hidden_layers=4,
        mlp_only_layers=[2],
    ),
    "qwen3-moe-every-second-layer": lambda: _of(
        Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=24,
        decoder_sparse_step=2,
    ),
    "qwen3-next": lambda: _of(
        Qwen3NextConfig,
        **_RECURRENT,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3.5": lambda: _of(Qwen3_5TextConfig, **_RECURRENT, tie_word_embeddings=True),
    "qwen3.5-moe": lambda: _of(
        Qwen3_5MoeTextConfig,
        **_RECURRENT,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "seed-oss": lambda: _of(SeedOssConfig, head_dim=16, attention_bias=True),
    "smollm3": lambda: _of(SmolLM3Config, no_rope_layer_interval=2),
    "qwen3-tied": lambda: _of(Qwen3Config, head_dim=32, tie_word_embeddings=True),
}


def write_model(family: str, folder: Path, **changes: Any) -> str:
    """Write a random model in float32 and return its folder.

    The weights are large, so that logits are far apart and depend on the whole context. changes:
    fields of the family's configuration.
    """
    torch.manual_seed(7)
    config = FAMILIES[family]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0, 1.0)
            else:
                parameter.normal_(0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.5, 0.5)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
    model.save_pretrained(folder)
    return str(folder)


def load_reference(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model with transformers."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def random_prompts(
    count: int, vocab_size: int, longest: int = 90, seed: int = 3
) -> list[list[int]]:
    """Return prompts of mixed lengths, some with a common beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    prompts = [
        [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]
    return [shared + p[: longest - 40] if i % 4 == 3 else p for i, p in enumerate(prompts)]


def reference_tokens(
    model: PreTrainedModel, prompts: Sequence[list[int]], counts: Sequence[int]
) -> list[list[int]]:
    """Return greedy continuations by transformers, computed one prompt at a time."""
    return [
        list(_continuation(model, tuple(prompt), count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]


@cache
def _continuation(model: PreTrainedModel, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return one continuation. It is cached, because several tests compare with the same one."""
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # without types
    out = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
        eos_token_id=None,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
