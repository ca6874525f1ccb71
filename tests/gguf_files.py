"""Writes GGUF files of models and tokenizers, with the package of the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Glm4ForCausalLM": "glm4",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen2MoeForCausalLM": "qwen2moe",
}
PAIRED = ("llama", "granite", "smollm3")
"""Architectures whose files have rows of q and k for an embedding of neighbours."""
FIELDS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_HALVES = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Types that the package cannot make -> bytes where a block has its float16 numbers."""
_SIZES = {"Q2_K": 4e-2, "Q3_K": 4e-3, "Q4_K": 1e-3, "Q5_K": 5e-4, "Q6_K": 1e-4,
          "IQ4_NL": 4e-3, "IQ4_XS": 1e-4}  # fmt: skip
"""Sizes of these numbers that give weights of usual size."""


def library() -> Any:
    return pytest.importorskip("gguf")


def encoded(values: Any, kind: str, seed: int = 0) -> Any:
    """Return rows in a type's blocks, uint8 [N, bytes]; random ones if nothing quantizes to it."""
    gguf = library()
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in _HALVES:
        return gguf.quants.quantize(values, type_)
    size, num_bytes = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (values.size // size, num_bytes), dtype=np.uint8)
    for start in _HALVES[kind]:
        scales = rng.uniform(0.2, 1, (len(blocks), 1)) * _SIZES[kind]
        blocks[:, start : start + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def decoded(blocks: Any, kind: str) -> Any:
    gguf = library()
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def in_pairs(rows: Any, heads: int) -> Any:
    """Return the rows of q or k, those of a head's halves in turn."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def out_of_pairs(rows: Any, heads: int) -> Any:
    pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    folder: Path,
    file: Path,
    kind_of: Callable[[str], str] = lambda _: "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    rounded: Path | None = None,
    split: int = 0,
) -> Path:
    """Write a model in transformers' form as GGUF, and return the first file.

    kind_of: by a tensor's name in the file, the type of a matrix. metadata: behind the
    architecture's name, which replaces what follows from config.json. extra: further tensors.
    rounded: a folder that gets the model with the weights that the file has. split: tensors a file.
    """
    gguf = library()
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    weights = load_file(folder / "model.safetensors")
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch],
        config["num_hidden_layers"],
    )
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=split)
    _add_metadata(writer, arch, config, metadata or {})
    heads_of = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    plain = dict(weights)
    for name, tensor in _joined(weights).items():
        base, _, end = name.rpartition(".")
        stored = names.get_name(base)
        assert stored is not None, name
        full, array = f"{stored}.{end}", tensor.float().numpy()
        heads = heads_of.get(stored.rpartition(".")[2], 0) if arch in PAIRED else 0
        array = _as_stored(arch, full, array, heads)
        kind = kind_of(full) if array.ndim > 1 and "_inp" not in full else "F32"
        if kind == "F32":
            writer.add_tensor(full, np.ascontiguousarray(array))
            continue
        shape = array.shape
        blocks = encoded(array.reshape(-1, shape[-1]), kind, len(full))
        if kind == "F16":
            writer.add_tensor(full, blocks.reshape(shape))
        else:
            writer.add_tensor(
                full,
                blocks.reshape(*shape[:-1], -1),
                raw_dtype=gguf.GGMLQuantizationType[kind],
            )
        back = np.array(decoded(blocks, kind)).reshape(shape)
        back = out_of_pairs(back, heads) if heads else back
        for part, own in _apart(name, torch.from_numpy(np.ascontiguousarray(back))).items():
            plain[part] = own.contiguous()
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    _write(writer)
    if rounded is not None:
        rounded.mkdir(exist_ok=True)
        for other in folder.glob("*.json"):
            (rounded / other.name).write_bytes(other.read_bytes())
        save_file(plain, rounded / "model.safetensors")
    return min(file.parent.glob(f"{file.stem}*.gguf"))


def _add_metadata(
    writer: Any, arch: str, config: dict[str, Any], metadata: Mapping[str, Any]
) -> None:
    config.setdefault("num_experts", config.get("num_local_experts"))
    values = {FIELDS[name]: config[name] for name in FIELDS if config.get(name) is not None}
    rope = config.get("rope_parameters") or {}
    values["rope.freq_base"] = rope.get("full_attention", rope).get("rope_theta", 10000.0)
    for name, value in {**values, **metadata}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{arch}.{name}", value)


def _as_stored(arch: str, name: str, array: Any, heads: int) -> Any:
    """Return a tensor's values as the architecture's files have them."""
    if heads:
        array = in_pairs(array, heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        array = array + 1
    return array[0] if name.endswith("ffn_gate_inp_shexp.weight") else array


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _joined(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with each kind of the experts' matrices in one tensor."""
    found: dict[str, torch.Tensor] = {}
    lists: dict[str, list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        before, is_expert, after = name.partition(".experts.")
        if not is_expert:
            found[name] = tensor
        elif after == "gate_up_proj":
            gate, up = tensor.chunk(2, 1)
            found[f"{before}.experts.gate_proj.weight"] = gate.contiguous()
            found[f"{before}.experts.up_proj.weight"] = up.contiguous()
        elif after == "down_proj":
            found[f"{before}.experts.down_proj.weight"] = tensor
        else:
            number, _, part = after.partition(".")
            lists.setdefault(f"{before}.experts.{part}", []).insert(int(number), tensor)
    return found | {name: torch.stack(parts) for name, parts in lists.items()}


def _apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    before, is_expert, part = name.partition(".experts.")
    if not is_expert:
        return {name: tensor}
    return {f"{before}.experts.{i}.{part}": one for i, one in enumerate(tensor)}
