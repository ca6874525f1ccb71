"""Metadata of a GGUF file as the fields of a config.json, which the families' readers read."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any, NoReturn

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.gguf.architectures import architecture_of
from sidestep.ipc.model.gguf.header import PLAIN, GgufHeader, StoredTensor

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
"""Metadata, behind the architecture's name -> fields of config.json."""
_ENDS = tuple(f"tokenizer.ggml.{one}_token_id" for one in ("eos", "eot", "eom"))
"""Tokens that end a text, a turn, and a turn with a call of a tool."""
_ROPE_TYPES = ("none", "linear", "yarn", "longrope")
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scale is that of the mean width of a head."""
_SCHEMES: dict[str, tuple[str, int, bool]] = {
    "Q4_0": ("int4", 32, False),
    "Q4_1": ("int4", 32, True),
    "Q5_0": ("int8", 32, False),
    "Q5_1": ("int8", 32, True),
    "Q8_0": ("int8", 32, False),
    "Q4_K": ("int4", 32, True),
    "Q5_K": ("int8", 32, True),
    "Q6_K": ("int8", 16, False),
}
"""Types of tensors that are multiplied with as codes -> their kind, group, and minimums."""


def config_values(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of a config.json. Raises EngineStartError for what is not supported."""
    kind, arch = architecture_of(header), header.values["general.architecture"]
    values: dict[str, Any] = {
        "architectures": [kind.name],
        "torch_dtype": "bfloat16",
        "eos_token_id": [header.values[name] for name in _ENDS if name in header.values],
        "bos_token_id": header.values.get("tokenizer.ggml.bos_token_id"),
        "vocab_size": _tensor(header, "token_embd.weight").shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **kind.values,
    }
    for stated, field in _FIELDS.items():
        if (value := header.values.get(f"{arch}.{stated}")) is not None:
            if isinstance(value, list):
                value = _same(header, f"{arch}.{stated}", value)
            values[field] = value
    if arch not in ("qwen2moe", "qwen3moe") and values.get("num_experts"):
        raise EngineStartError(
            f"model: {header.path} has the GGUF architecture {arch!r} with experts, which is not "
            "supported; supported with experts are qwen2moe and qwen3moe"
        )
    values |= _particular(header, arch, values)
    values["rope_parameters"] = _rope(header, arch, values)
    if (quantized := _main_type(header)) is not None:
        code, columns, offset = _SCHEMES.get(quantized, (None, 0, False))
        values["quantization_config"] = {
            "quant_method": "gguf", "kind": code, "columns": columns, "offset": offset
        }  # fmt: skip
    return values


def _particular(header: GgufHeader, arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return fields that follow from others in one architecture or another."""
    found: dict[str, Any] = {}
    has_bias = "blk.0.attn_q.bias" in header.tensors
    if arch in ("llama", "granite", "smollm3", "qwen3", "glm4"):
        found["attention_bias"] = has_bias
    if arch in ("llama", "granite"):
        found["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if arch == "llama" and values.get("sliding_window"):
        found["architectures"] = ["MistralForCausalLM"]
    if arch == "qwen2moe":
        found["qkv_bias"] = has_bias
    if arch in _LARGE_GEMMA:
        heads, width = values.get("num_attention_heads", 1), values.get("hidden_size", 0)
        large = values.get("num_hidden_layers") == _LARGE_GEMMA[arch]
        found["query_pre_attn_scalar"] = width // heads if large else values.get("head_dim", 256)
    dims = header.values.get(f"{arch}.rope.dimension_count")
    if arch in ("glm4", "phi3") and dims:
        heads, width = values.get("num_attention_heads", 1), values.get("hidden_size", 0)
        found["partial_rotary_factor"] = dims / (values.get("head_dim") or width // heads)
    elif arch == "llama" and dims and "head_dim" not in values:
        found["head_dim"] = dims
    return found


def _rope(header: GgufHeader, arch: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return rope_parameters; every layer's, or those of the layers without a window."""

    def stated(name: str) -> Any:
        return header.values.get(f"{arch}.rope.scaling.{name}")

    kind = stated("type") or "none"
    if kind not in _ROPE_TYPES:
        _refuse(header, f"{arch}.rope.scaling.type", kind, ", ".join(_ROPE_TYPES))
    original = stated("original_context_length")
    if any(name.startswith("rope_factors_") for name in header.tensors):
        length = values["max_position_embeddings"]
        rope = _factors(header, "rope_factors_short.weight", "rope_factors_long.weight")
        rope |= {"original_max_position_embeddings": original or length}
        rope["factor"] = length / rope["original_max_position_embeddings"]
        attention = stated("attn_factor")
        return rope if attention is None else {**rope, "attention_factor": attention}
    if "rope_freqs.weight" in header.tensors:
        rope = _factors(header, "rope_freqs.weight", "rope_freqs.weight")
        length = values["max_position_embeddings"]
        neutral = {"factor": 1.0, "attention_factor": 1.0}
        return {**rope, **neutral, "original_max_position_embeddings": length}
    if kind == "longrope":
        raise EngineStartError(f"model: {header.path} lacks rope_factors_short.weight")
    if stated("yarn_log_multiplier"):
        name = f"{arch}.rope.scaling.yarn_log_multiplier"
        _refuse(header, name, stated("yarn_log_multiplier"), "files without it")
    factor = stated("factor")
    if kind == "none" or not factor:
        return {}
    rope = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original:
            rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := stated(f"yarn_{name}")) is not None:
                rope[name] = value
    return rope


def _factors(header: GgufHeader, short: str, long: str) -> dict[str, Any]:
    """Return an embedding whose pairs turn slower by factors of their own."""
    names = {"short_factor": short, "long_factor": long}
    lists = {field: _numbers(_tensor(header, name)) for field, name in names.items()}
    return {"rope_type": "longrope", **lists}


def _numbers(tensor: StoredTensor) -> list[float]:
    """Return the values of a small tensor."""
    count = tensor.num_rows * tensor.shape[-1]
    if tensor.block.name != "F32":
        raise EngineStartError(
            f"model: {tensor.name} in {tensor.file} is {tensor.block.name}; supported is F32"
        )
    with tensor.file.open("rb") as opened:
        opened.seek(tensor.offset)
        return list(struct.unpack(f"<{count}f", opened.read(4 * count)))


def _tensor(header: GgufHeader, name: str) -> StoredTensor:
    if name not in header.tensors:
        raise EngineStartError(f"model: {header.path} lacks {name}")
    return header.tensors[name]


def _same(header: GgufHeader, name: str, values: list[Any]) -> Any:
    """Return the value that all layers have."""
    if len(set(values)) != 1:
        _refuse(header, name, values, "one value for all layers")
    return values[0]


def _refuse(header: GgufHeader, name: str, value: Any, supported: str) -> NoReturn:
    raise EngineStartError(
        f"model: {name} in {header.path} is {value!r}, which is not supported; supported are "
        f"{supported}"
    )


def _main_type(header: GgufHeader) -> str | None:
    """Return the type of most numbers of the layers; None if all matrices are plain."""
    counts: Counter[str] = Counter()
    for name, tensor in header.tensors.items():
        if name.startswith("blk.") and len(tensor.shape) > 1:
            counts[tensor.block.name] += tensor.num_rows * tensor.shape[-1]
    if all(name in PLAIN for name in counts):
        return None
    return counts.most_common(1)[0][0]
