"""Gemma 4's config.json: heads of two shapes, shared keys, and fields that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.model.kv.kv_layout import kv_layout
from sidestep.ipc.model.layer_spec import AttentionSpec, ExpertsSpec, MlpSpec, attention_of
from sidestep.ipc.model.layer_split import why_one_stage
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec

FIELDS: dict[str, Any] = {
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size_per_layer_input": 0,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, fields: dict[str, Any]) -> str:
    config = {"architectures": ["Gemma4ForCausalLM"], **FIELDS, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def read(folder: Path, **fields: Any) -> ModelSpec:
    return load_model_spec(write(folder, fields))


def heads_of(mixer: AttentionSpec) -> tuple[int, int, int]:
    return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim


def test_full_attention_has_heads_of_another_shape(tmp_path: Path) -> None:
    spec = read(tmp_path, num_global_key_value_heads=1, attention_k_eq_v=True)
    kinds = [(heads_of(m), m.window, m.keys_as_values) for m in attention_of(spec.layers)]
    assert kinds == 2 * [*5 * [((8, 4, 256), 512, False)], ((8, 1, 512), 0, True)]
    ropes = [mixer.rope for mixer in attention_of(spec.layers)[4:6]]
    assert [rope.rope_type for rope in ropes if rope] == ["default", "proportional"]


def test_the_sizes_of_layers_may_be_given_by_layer(tmp_path: Path) -> None:
    older = read(tmp_path, num_global_key_value_heads=2, attention_k_eq_v=True, global_head_dim=128)
    sizes = {"head_dim": 128, "num_key_value_heads": 2}
    by_layer = {"5": sizes, "11": sizes}
    newer = read(tmp_path, attention_k_eq_v=True, per_layer_config=by_layer)
    assert newer.layers == older.layers


def test_layers_that_read_the_keys_of_others_have_no_memory(tmp_path: Path) -> None:
    own = read(tmp_path, num_hidden_layers=6)
    shared = read(
        tmp_path,
        num_kv_shared_layers=6,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention"] * 5
        + ["full_attention"]
        + ["sliding_attention"] * 5
        + ["full_attention"],
    )
    assert [m.kv_back for m in attention_of(shared.layers)] == [0] * 6 + [2, 3, 4, 5, 6, 6]
    widths = [layer.mlp.width for layer in shared.layers if isinstance(layer.mlp, MlpSpec)]
    assert widths == [96] * 6 + [192] * 6
    alone, together = (kv_layout(one, itemsize=2, block_size=16) for one in (own, shared))
    assert together.memories == alone.memories
    assert together.places[6:11] == (alone.places[4],) * 5
    assert together.places[11] == alone.places[5]


def test_experts_stand_beside_the_mlp(tmp_path: Path) -> None:
    spec = read(
        tmp_path, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8
    )
    experts = spec.layers[0].mlp
    assert isinstance(experts, ExpertsSpec) and experts.shared_width == 96
    assert (experts.num_experts, experts.num_chosen, experts.width) == (4, 2, 8)


def test_attention_in_both_directions_between_images_changes_nothing_here(tmp_path: Path) -> None:
    plain = read(tmp_path)
    assert read(tmp_path, use_bidirectional_attention="vision") == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "'all' is not supported; supported are null, 'vi"),
        ({"num_kv_shared_layers": 8}, "no layer before these has keys of each kind"),
        ({"num_kv_shared_layers": 12}, "no layer before these has keys of each kind"),
        ({"num_kv_shared_layers": 13}, "no layer before these has keys of each kind"),
        (
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 999},
            "vocab_size_per_layer_input in config.json is 999, and vocab_size is 1000",
        ),
        ({"per_layer_config": {"5": {"width": 3}}}, "may give a layer head_dim, num_key_value_hea"),
        ({"per_layer_config": {"5": {"head_dim": 0}}}, "head_dim of per_layer_config .* must be"),
        ({"global_head_dim": 31}, "head_dim in config.json must be even, not 31"),
        ({"num_key_value_heads": 3}, "is 8, no multiple of 3 KV heads"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "top_k_experts in config.json is 5, of 4 experts",
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}
                }
            },
            "partial_rotary_factor in config.json must be a number above 0 and at most 1, not 1.5",
        ),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_computed_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineStartError, match=message):
        read(tmp_path, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, "vectors of token ids, which only the first stage"),
        ({"num_kv_shared_layers": 6}, "its last layers read the keys and values of earlier layers"),
    ],
    ids=str,
)
def test_models_whose_layers_belong_together_have_one_stage(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, fields)
    assert why_one_stage(load_model_spec(path)) is not None
    args = EngineArgs(model=path, skip_tokenizer_init=True, pipeline_parallel_size=2)
    with pytest.raises(ValidationError, match=f"pipeline_parallel_size.* {message}") as caught:
        args.create_engine_config()
    assert "\n" not in str(caught.value)
