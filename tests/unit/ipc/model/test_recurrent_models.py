"""Models with recurrent layers: their sizes, their states, and fields that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.config import check_tensor_parallel
from sidestep.ipc.model.layer_spec import (
    ExpertsSpec,
    MlpSpec,
    RopeSpec,
    attention_of,
    recurrent_of,
)
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from tests.recurrent.models import ARCHITECTURES, KINDS

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the families."""
    for name, family in ARCHITECTURES.items():
        monkeypatch.setitem(registry.MODELS, name, family)


def load(folder: Path, config: dict[str, Any], **overrides: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_spec(str(folder), overrides)


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model_class, make_config = KINDS[kind]
    model, config = model_class(make_config()), make_config()
    config.architectures = [model_class.__name__]
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    count = sum(weight.numel() for weight in model.parameters())
    assert num_parameters(spec, first=True, last=True) == count


def test_the_sizes_of_qwen3_next_80b_a3b(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_NEXT_80B)
    assert num_parameters(spec, first=True, last=True) == pytest.approx(80e9, rel=1e-2)
    assert (len(attention_of(spec.layers)), len(recurrent_of(spec.layers))) == (12, 36)
    assert [type(layer.mixer) for layer in spec.layers[:4]].count(DeltaSpec) == 3
    attention = attention_of(spec.layers)[0]
    assert attention.gate and attention.head_norms and spec.norm.offset == 1.0
    assert attention.rope == RopeSpec(theta=1e7, dims=64)
    # 32 heads of 128 x 128 float32, and three inputs of 8192 channels, in 36 layers.
    states = [delta.state_bytes(2) for delta in recurrent_of(spec.layers)]
    assert sum(states) == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert all(
        2 * delta.state_bytes(2, 2) == delta.state_bytes(2) for delta in recurrent_of(spec.layers)
    )


def test_ranks_share_the_key_heads(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_NEXT_80B, linear_num_key_heads=4)
    check_tensor_parallel(spec, 4)
    with pytest.raises(ValidationError, match="key heads of recurrent layers"):
        check_tensor_parallel(spec, 8)


def test_some_layers_are_dense(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_NEXT_80B, mlp_only_layers=[0, 3])
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [MlpSpec, ExpertsSpec, ExpertsSpec, MlpSpec] + [ExpertsSpec] * 44


def test_a_language_model_within_another_config(tmp_path: Path) -> None:
    """A checkpoint that also reads images describes its language model in text_config."""
    config = KINDS["qwen3_5"][1]()
    text = {**config.to_dict(), "eos_token_id": 5}
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"depth": 2},
        "tie_word_embeddings": True,
        "image_token_id": 90,
        "eos_token_id": None,
    }
    spec = load(tmp_path, outer)
    plain = load(tmp_path, {**text, "architectures": ["Qwen3_5ForCausalLM"]})
    assert spec.layers == plain.layers and spec.eos_token_ids == (5,)
    assert attention_of(spec.layers)[0].rope == RopeSpec(theta=1e6, dims=8)
    assert load(tmp_path, outer, max_position_embeddings=99).max_position_embeddings == 99
    nested = load(tmp_path, outer, text_config={"max_position_embeddings": 98})
    assert nested.max_position_embeddings == 98


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 24}, "linear_num_value_heads .* is 24, no multiple of 16"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act .* must be silu for recurrent layers"),
        ({"layer_types": ["linear_attention"] * 47 + ["mamba"]}, "layer type 'mamba'"),
        ({"layer_types": ["full_attention"] * 47}, "layer_types .* names 47 layers"),
        ({"layer_types": ["linear_attention"] * 48}, "must name full_attention at least once"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim .* at least 2"),
        ({"rope_parameters": {"mrope_section": [1], "rope_theta": 1e4, "new": 3}}, "new of rope"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_computed_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        load(tmp_path, {**QWEN3_NEXT_80B, **changes})
