"""Small random models with recurrent layers, which transformers writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from sidestep.ipc.common.registry import Family

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
KINDS: dict[str, tuple[Callable[..., PreTrainedModel], Callable[[], PreTrainedConfig]]] = {
    "qwen3_next": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(**COMMON, **EXPERTS, intermediate_size=56, mlp_only_layers=[1]),
    ),
    "qwen3_next-dense": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(
            **COMMON,
            num_experts=0,
            intermediate_size=56,
            attention_bias=True,
            layer_types=["full_attention", "linear_attention"] * 2,
        ),
    ),
    "qwen3_5": (
        Qwen3_5ForCausalLM,
        lambda: Qwen3_5TextConfig(
            **COMMON,
            intermediate_size=56,
            tie_word_embeddings=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        ),
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeForCausalLM,
        lambda: Qwen3_5MoeTextConfig(**COMMON, **EXPERTS),
    ),
}
"""By name, the class in transformers and a config."""
_NEXT, _DECODER = "qwen3_next:Qwen3NextForCausalLM", "decoder:DecoderForCausalLM"


def _family(reader: str, model: str = _DECODER) -> Family:
    return Family(
        spec=f"sidestep.ipc.model.families.recurrent.{reader}",
        model=f"sidestep.executor.models.{model}",
    )


ARCHITECTURES: dict[str, Family] = {
    "Qwen3NextForCausalLM": _family("qwen3_next:qwen3_next", _NEXT),
    "Qwen3_5ForCausalLM": _family("qwen3_5:qwen3_5"),
    "Qwen3_5ForConditionalGeneration": _family("qwen3_5:qwen3_5"),
    "Qwen3_5MoeForCausalLM": _family("qwen3_5:qwen3_5_moe"),
    "Qwen3_5MoeForConditionalGeneration": _family("qwen3_5:qwen3_5_moe"),
}
"""Entries for the registry of models."""


def write_model(kind: str, folder: Path) -> tuple[str, PreTrainedModel]:
    """Write a model to a folder; return the folder and the model."""
    torch.manual_seed(0)
    model_class, make_config = KINDS[kind]
    model = model_class(make_config()).requires_grad_(False).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(0, 0.15)
        elif not name.endswith("A_log"):
            weight.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.3)
    model.save_pretrained(folder)
    return str(folder), model
