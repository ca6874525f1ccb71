"""What the engine needs to know of a model: its Hugging Face config.json, read into one checked, typed structure.

Read without torch, so that the frontend refuses what cannot run before any process starts. A value that would change
the model's arithmetic and that the engine does not implement is refused by name: never loaded and silently wrong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from sidestep.ipc.errors import EngineStartError
from sidestep.ipc.registry import MODELS

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TORCH_DTYPES = ("bfloat16", "float16", "float32")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base and scaling, with the names of config.json."""

    theta: float
    rope_type: str = "default"
    scaling: dict[str, Any] = {}
    """The remaining keys of rope_parameters (or rope_scaling), such as factor or low_freq_factor."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder-only transformer. Sizes are of the whole model, before tensor parallelism."""

    path: str
    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool
    """Bias on the q, k and v projections."""
    attention_output_bias: bool
    """Bias on the output projection of attention."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head's q and k before the rotary embedding."""
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, the current one included; 0 for full attention."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None


_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def resolve_model_path(model: str, revision: str | None = None, files: Sequence[str] = _FILES) -> str:
    """A local folder for a folder's path or a hub name (fetched where a hub is reachable; of it these files)."""
    if os.path.isdir(model):
        return os.path.abspath(model)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise EngineStartError(f"model: {model!r} is not a folder, nor a hub name of the form owner/name")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the hub client raises many types, all meaning the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineStartError(
            f"model: {model!r} is not a folder and could not be fetched from a hub: {reason}") from None


def load_model_spec(path: str) -> ModelSpec:
    """Reads `path`/config.json (and generation_config.json). Raises EngineStartError with one line on what is wrong."""
    config = _read_json(Path(path) / "config.json")
    if config is None:
        raise EngineStartError(f"model: {path} has no config.json")
    try:
        return _build(path, config, _read_json(Path(path) / "generation_config.json") or {})
    except KeyError as missing:
        raise EngineStartError(f"model: config.json in {path} lacks {missing}") from None


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise EngineStartError(f"model: {file} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise EngineStartError(f"model: {file} does not hold a JSON object")
    return value


def _build(path: str, config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    architecture = _architecture(config)
    _refuse_unsupported(config)
    heads = config["num_attention_heads"]
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        path=path,
        architecture=architecture,
        dtype=_dtype(config),
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        # Qwen2 has a fixed layout that its config.json does not spell out: bias on q, k, v and nowhere else.
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_output_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture),
        eos_token_ids=_eos(generation.get("eos_token_id"), config.get("eos_token_id")),
        bos_token_id=config.get("bos_token_id"),
    )


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in MODELS:
            return str(name)
    found = ", ".join(map(str, names)) or "none"
    raise EngineStartError(f"model: architecture {found} is not supported; supported are {', '.join(sorted(MODELS))}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise EngineStartError(f"model: hidden_act {config['hidden_act']!r} is not supported; supported is silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise EngineStartError(f"model: quantization {method!r} is not supported; supported are unquantised weights")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineStartError(f"model: partial_rotary_factor {config['partial_rotary_factor']} is not supported; "
                               "supported is 1.0")
    if config.get("pretraining_tp", 1) not in (None, 1):
        raise EngineStartError(f"model: pretraining_tp {config['pretraining_tp']} is not supported; supported is 1")


def _dtype(config: dict[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise EngineStartError(f"model: dtype {name!r} is not supported; supported are {', '.join(TORCH_DTYPES)}")
    return name


def _rope(config: dict[str, Any]) -> RopeSpec:
    """Newer configs hold everything in rope_parameters; older ones rope_theta, and rope_scaling where there is any."""
    params = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = params.pop("rope_type", None) or params.pop("type", None) or "default"
    params.pop("type", None)
    theta = params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if rope_type not in ROPE_TYPES:
        raise EngineStartError(
            f"model: rope type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if params.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineStartError("model: partial_rotary_factor is not supported")
    return RopeSpec(theta=float(theta), rope_type=rope_type, scaling=params)


def _windows(config: dict[str, Any], architecture: str) -> tuple[int, ...]:
    layers, window = config["num_hidden_layers"], config.get("sliding_window") or 0
    if architecture.startswith("Qwen") and not config.get("use_sliding_window", False):
        window = 0
    if architecture == "LlamaForCausalLM":
        window = 0
    kinds = config.get("layer_types")
    if kinds and architecture != "LlamaForCausalLM":
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = config.get("max_window_layers", 0) if architecture.startswith("Qwen") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _eos(*values: Any) -> tuple[int, ...]:
    """The ids of the first source that names any."""
    for value in values:
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()
