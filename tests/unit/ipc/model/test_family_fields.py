"""Fields of single families: those that are refused, and files that hold a model in another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.layer_spec import MlpSpec, attention_of
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def load(folder: Path, architecture: str, **fields: Any) -> ModelSpec:
    config = {**COMMON, "architectures": [architecture], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_spec(str(folder))


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "GraniteForCausalLM",
            {"residual_multiplier": 0},
            "residual_multiplier in config.json must be above 0",
        ),
        (
            "GraniteForCausalLM",
            {"logits_scaling": -8.0},
            "logits_scaling in config.json must be above 0",
        ),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": YARN},
            "llama_4_scaling_beta of the rotary embedding .* must be a number, not None",
        ),
        (
            "Ministral3ForCausalLM",
            {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}},
            "rope_type in config.json must be 'yarn' for this architecture",
        ),
        (
            "MistralForCausalLM",
            {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta of rope type 'yarn' in config.json is not supported",
        ),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "llama"}},
            "model_type of text_config .* 'llama' is not supported; supported are ministral3, mis",
        ),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_computed_is_refused(
    architecture: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        load(tmp_path, architecture, **fields)


def test_gemma_s_files_leave_defaults_of_the_language_model_out(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    spec = load_model_spec(str(tmp_path))
    assert num_parameters(spec, first=True, last=True) == pytest.approx(3.88e9, rel=2e-3)
    mixers = attention_of(spec.layers)
    assert mixers[0].head_dim == 256 and spec.dtype == "bfloat16"
    mlp = spec.layers[0].mlp
    assert isinstance(mlp, MlpSpec) and mlp.activation == "gelu_tanh"
    assert [mixer.window for mixer in mixers[:6]] == [1024] * 5 + [0]
