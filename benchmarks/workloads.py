"""Workloads for comparing engines, with the same seeds, token ids and lengths for every engine.

All requests of an offline workload are submitted at once, with ignore_eos and without
detokenisation. An online one has Poisson arrivals.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 199998,
        "eos_token_id": 200002,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
}
# Layers as Qwen3-Next's, but fewer of them, with fewer experts and a larger vocabulary.
MODELS["qwen3.5-35b-a3b"] = MODELS["qwen3-next-80b-a3b"] | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 248320,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
}
QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
}
MODELS |= {
    f"{model}-{name}": MODELS[model] | {"quantization_config": config}
    for model in ("llama-3.1-8b", "qwen3-30b-a3b")
    for name, config in QUANTIZED.items()
}
# A checkpoint of Qwen3-Next in bf16 would fill the GPU.
MODELS["qwen3-next-80b-a3b-fp8-block"] = MODELS.pop("qwen3-next-80b-a3b") | {
    "quantization_config": QUANTIZED["fp8-block"]
}


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted together."""

    prompts: list[list[int]]
    max_tokens: list[int]
    temperature: float


def write_model(name: str, root: str) -> str:
    """Write the model's config.json, for random weights, and return its folder."""
    path = os.path.join(root, name)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(MODELS[name], file)
    return path


def prompts(
    count: int, length: Callable[[random.Random], int], vocab_size: int, seed: int
) -> list[list[int]]:
    """Return prompts of random token ids."""
    rng = random.Random(seed)
    return [
        [rng.randrange(10, min(vocab_size, 100000)) for _ in range(length(rng))]
        for _ in range(count)
    ]


def offline(name: str, vocab_size: int) -> Workload:
    """Return the named workload. Raises KeyError if there is none of this name."""
    rng = random.Random(7)
    if name == "mixed256":  # 100 to 1024 tokens of input, and of output
        return Workload(
            prompts(256, lambda r: r.randint(100, 1024), vocab_size, 0),
            [rng.randint(100, 1024) for _ in range(256)],
            0.6,
        )
    if name == "fixed512":
        return Workload(prompts(512, lambda r: 1024, vocab_size, 1), [256] * 512, 0.0)
    if name == "single":  # decode latency
        return Workload(prompts(1, lambda r: 512, vocab_size, 2), [512], 0.0)
    if name == "single8":
        return Workload(prompts(8, lambda r: 512, vocab_size, 3), [512] * 8, 0.0)
    raise KeyError(name)


def online(
    rate: float, count: int, vocab_size: int, seed: int = 11
) -> list[tuple[float, list[int], int]]:
    """Return Poisson arrivals: (seconds, prompt, max_tokens)."""
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for prompt in prompts(count, lambda r: r.randint(64, 1024), vocab_size, seed + 1):
        now += rng.expovariate(rate)
        arrivals.append((now, prompt, rng.randint(32, 256)))
    return arrivals
