"""Models with experts: their sizes, what they need of a machine, and fields that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.planning.topology import Shard
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.config import check_tensor_parallel, with_whole_experts
from sidestep.ipc.model.layer_spec import ExpertsSpec, MlpSpec
from sidestep.ipc.model.layer_split import split_layers, stage_of
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec

QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}
OLMOE = {**QWEN3_30B, "architectures": ["OlmoeForCausalLM"]}
GLM = {
    **QWEN3_30B,
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 128,
    "n_group": 8,
    "topk_group": 2,
}


def load(folder: Path, config: dict[str, Any], **overrides: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return load_model_spec(str(folder), overrides)


def test_the_sizes_of_qwen3_30b_a3b(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_30B)
    assert num_parameters(spec, first=True, last=True) == pytest.approx(30.5e9, rel=2e-3)
    whole = Shard(spec, 1, stage_of((48,), 0))
    # Its name says 3 billion active parameters; the embedding is not read.
    assert whole.read == pytest.approx(3.04e9, rel=1e-2)
    half = Shard(spec, 2, stage_of((48,), 0))
    assert half.weights == pytest.approx(whole.weights / 2, rel=1e-2)


def test_an_expert_is_divided_by_its_own_width(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_30B, moe_intermediate_size=770)
    check_tensor_parallel(spec, 2)
    with pytest.raises(ValidationError, match="intermediate size of an expert"):
        check_tensor_parallel(spec, 4)


def test_ranks_with_whole_experts_have_as_much_of_them(tmp_path: Path) -> None:
    apart = load(tmp_path, QWEN3_30B, moe_intermediate_size=770)
    whole = with_whole_experts(apart)
    check_tensor_parallel(whole, 4)  # 770 does not divide among 4 ranks
    with pytest.raises(ValidationError, match="does not divide the model's 126 experts"):
        check_tensor_parallel(with_whole_experts(load(tmp_path, QWEN3_30B, num_experts=126)), 4)
    shards = [Shard(spec, 2, stage_of((48,), 0)) for spec in (apart, whole)]
    assert shards[0].weights == shards[1].weights and shards[0].read == shards[1].read


def test_expert_parallelism_of_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    spec = load(tmp_path, {**QWEN3_30B, "architectures": ["Qwen3ForCausalLM"]})
    with pytest.raises(ValidationError, match="enable_expert_parallel: the model has no experts"):
        with_whole_experts(spec)


def test_a_stage_of_dense_layers_has_more_of_them(tmp_path: Path) -> None:
    spec = load(tmp_path, QWEN3_30B, mlp_only_layers=list(range(24)))
    kinds = [type(layer.mlp) for layer in spec.layers]
    assert kinds == [MlpSpec] * 24 + [ExpertsSpec] * 24
    first, second = split_layers(spec, 2)
    assert first > 24 > second


def test_newer_files_name_the_number_of_experts_in_another_way(tmp_path: Path) -> None:
    config = {**QWEN3_30B, "num_local_experts": 128}
    assert load(tmp_path, config) == load(tmp_path, QWEN3_30B)
    with pytest.raises(EngineStartError, match="num_experts .* is 64, and num_local_experts is"):
        load(tmp_path, config, num_experts=64)


@pytest.mark.parametrize(
    ("config", "field", "value", "message"),
    [
        (OLMOE, "clip_qkv", 8.0, "clip_qkv .* 8.0 is not supported; supported is null"),
        (QWEN3_30B, "num_experts_per_tok", 129, "num_experts_per_tok .* is 129, of 128 experts"),
        (QWEN3_30B, "mlp_only_layers", ["a"], "mlp_only_layers .* list of whole numbers"),
        (QWEN3_30B, "num_experts", 0, "num_experts .* must be a whole number"),
        (GLM, "n_group", 7, "n_group .* is 7, which does not divide 128 experts"),
        (GLM, "topk_group", 9, "topk_group .* is 9, and n_group is 8"),
        (GLM, "num_experts_per_tok", 33, "num_experts_per_tok .* is 33, of 32 experts"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_computed_is_refused(
    config: dict[str, Any], field: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        load(tmp_path, {**config, field: value})
