"""The model's config: config.json, generation_config.json and the tokenizer's files.

They are read as they are found, with the user's overrides.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.model.layer_spec import RopeSpec, attention_of

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "tie_word_embeddings": True,
}
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""The setting that Qwen's model cards recommend for long texts."""


def read(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps({**QWEN3, **(changes or {})}))
    return EngineArgs(model=str(folder), **options).create_engine_config()


def rope_of(config: EngineConfig) -> RopeSpec:
    """Return the rotary embedding, which is the same in all layers."""
    ropes = [mixer.rope for mixer in attention_of(config.spec.layers)]
    rope = ropes[0]
    assert rope is not None and all(one == rope for one in ropes)
    return rope


def problem(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> str:
    with pytest.raises((EngineStartError, ValidationError)) as caught:
        read(folder, changes, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# YaRN.


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": CARD},
        {"rope_scaling": {"type": "yarn", **{n: v for n, v in CARD.items() if n != "rope_type"}}},
        {"rope_parameters": {"rope_theta": 1000000, **CARD}, "rope_theta": None},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 32768,
        },
        {"rope_scaling": CARD, "max_position_embeddings": 131072},
        {
            "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 32768},
            "max_position_embeddings": 131072,
        },
    ],
    ids=str,
)
def test_yarn_of_a_model_card_reaches_its_factor_times_the_training_length(
    tmp_path: Path, changes: Any
) -> None:
    config = read(tmp_path, changes)
    assert config.max_model_len == config.spec.max_position_embeddings == 131072
    assert rope_of(config).theta == 1e6
    assert rope_of(config).scaling == {
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (
            {"rope_type": "yarn", "original_max_position_embeddings": "32k", "factor": 4.0},
            "original_max_position_embeddings",
        ),
        ({"rope_type": "yarn"}, "factor of rope type 'yarn' in config.json is missing"),
        (
            {**CARD, "factor": "4"},
            "factor of the rotary embedding in config.json must be a positive number, not '4'",
        ),
        ({**CARD, "beta_fast": -1}, "beta_fast"),
        ({**CARD, "short_factor": [1.0]}, "short_factor of rope type 'yarn'"),
        ({**CARD, "truncate": "no"}, "truncate"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "default", "mrope_section": [1]}, "mrope_section"),
        ([4.0], "rope_scaling in config.json must be"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
    ],
    ids=str,
)
def test_a_rotary_embedding_that_is_not_known_is_refused_by_name(
    tmp_path: Path, rope: Any, words: str
) -> None:
    assert words in problem(tmp_path, {"rope_scaling": rope})


# Overrides.


def test_an_override_is_merged_into_the_object_that_the_file_has(tmp_path: Path) -> None:
    file = {"rope_theta": None, "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}

    def merged(changes: dict[str, Any], **overrides: Any) -> RopeSpec:
        return rope_of(read(tmp_path, changes, hf_overrides=overrides))

    rope = merged(file, rope_scaling=CARD)
    assert (rope.theta, rope.rope_type, rope.scaling["factor"]) == (5000.0, "yarn", 4.0)
    rope = merged({"rope_scaling": CARD}, rope_parameters={"factor": 2.0})
    assert rope.scaling == {"factor": 2.0, "original_max_position_embeddings": 32768}
    rope = merged({"rope_scaling": CARD}, rope_scaling={"type": "linear", "factor": 2})
    assert (rope.theta, rope.rope_type, rope.scaling) == (1e6, "linear", {"factor": 2})
    rope = merged({"rope_scaling": CARD}, rope_scaling=None)
    assert (rope.theta, rope.rope_type, rope.scaling) == (1e6, "default", {})
    assert merged(file, rope_theta=7.0).theta == 7.0


def test_an_override_counts_whatever_other_name_or_file_has_the_field(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    file = {"torch_dtype": None, "dtype": "bfloat16"}
    assert read(tmp_path, file, hf_overrides={"torch_dtype": "float16"}).spec.dtype == "float16"
    assert read(tmp_path, hf_overrides={"dtype": "float16"}).spec.dtype == "float16"
    assert read(tmp_path).spec.eos_token_ids == (9,)
    assert read(tmp_path, hf_overrides={"eos_token_id": [3, 4]}).spec.eos_token_ids == (3, 4)


def test_an_override_of_the_length_counts(tmp_path: Path) -> None:
    assert read(tmp_path, hf_overrides={"max_position_embeddings": 65536}).max_model_len == 65536
    both = {"rope_scaling": CARD, "max_position_embeddings": 131072}
    assert read(tmp_path, hf_overrides=both).max_model_len == 131072
    assert (
        read(tmp_path, hf_overrides={**both, "max_position_embeddings": 50000}).max_model_len
        == 50000
    )
    assert "is more than YaRN reaches" in problem(
        tmp_path, hf_overrides={**both, "max_position_embeddings": 140000}
    )


def test_what_an_override_makes_is_refused_as_in_a_file(tmp_path: Path) -> None:
    assert problem(tmp_path, hf_overrides={"num_hidden_layers": "3"}) == (
        "model: num_hidden_layers in config.json with hf_overrides must be a whole number of at "
        "least 1, not '3'"
    )
    assert "architecture Nobody is not supported" in problem(
        tmp_path, hf_overrides={"architectures": ["Nobody"]}
    )
    assert problem(tmp_path, hf_overrides={"max_postion_embeddings": 5}).startswith(
        "hf_overrides: 'max_postion_embeddings' is neither a field of this model's config.json nor"
    )
    assert (
        read(
            tmp_path, hf_overrides={"bos_token_id": 3}, changes={"bos_token_id": 1}
        ).spec.num_layers
        == 2
    )
    assert problem(tmp_path, hf_overrides=[1]) == "hf_overrides: must be a mapping or None, not [1]"


# Types.


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        (
            "num_hidden_layers",
            "2",
            "num_hidden_layers in config.json must be a whole number of at least 1, not '2'",
        ),
        (
            "num_hidden_layers",
            0,
            "num_hidden_layers in config.json must be a whole number of at least 1, not 0",
        ),
        ("hidden_size", 64.5, "hidden_size"),
        ("vocab_size", [5], "vocab_size"),
        ("num_attention_heads", True, "heads"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps in config.json must be a number, not '1e-6'"),
        (
            "tie_word_embeddings",
            "yes",
            "tie_word_embeddings in config.json must be true or false, not 'yes'",
        ),
        (
            "architectures",
            "Qwen3ForCausalLM",
            "architectures in config.json must be a list of strings",
        ),
        (
            "eos_token_id",
            "</s>",
            "eos_token_id in config.json must be a token id or a list of them, not '</s>'",
        ),
        (
            "layer_types",
            ["full_attention", "linear_attention"],
            "layer type 'linear_attention' of layer_types",
        ),
        (
            "layer_types",
            ["full_attention"],
            "layer_types in config.json names 1 layers, and num_hidden_layers is 2",
        ),
        (
            "quantization_config",
            "awq",
            "quantization_config in config.json must be an object, not 'awq'",
        ),
    ],
)
def test_a_field_of_another_type_is_refused_in_one_sentence(
    tmp_path: Path, field: str, value: Any, words: str
) -> None:
    said = problem(tmp_path, {field: value})
    assert said.startswith("model: ") and words in said


def test_a_null_is_a_field_that_is_not_there(tmp_path: Path) -> None:
    spec = read(tmp_path, {"head_dim": None, "num_key_value_heads": None, "layer_types": None}).spec
    found = [(one.head_dim, one.num_kv_heads, one.window) for one in attention_of(spec.layers)]
    assert found == [(16, 4, 0)] * 2


# Ends of sequences.


@pytest.mark.parametrize(
    ("generation", "tokenizer", "expected"),
    [
        (None, None, (7,)),
        ({"eos_token_id": [1, 2]}, None, (1, 2)),
        (None, "<end>", (7, 5)),
        ({"eos_token_id": [1, 5]}, "<end>", (1, 5)),
        ({"eos_token_id": 1}, {"content": "<end>"}, (1, 5)),
        (None, "in the vocabulary", (7, 6)),
        (None, "nowhere", (7,)),
        ({}, None, (7,)),
    ],
    ids=str,
)
def test_an_output_ends_at_the_files_tokens_and_at_the_tokenizer_s(
    tmp_path: Path, generation: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    """End at vLLM's tokens: those of generation_config.json, else of config.json.

    The tokenizer's own are added.
    """
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(
                {
                    "added_tokens": [{"id": 5, "content": "<end>", "special": True}],
                    "model": {"type": "BPE", "vocab": {"in the vocabulary": 6}},
                }
            )
        )
    assert read(tmp_path).spec.eos_token_ids == expected
    for source in ("none", "vllm"):
        assert read(tmp_path, generation_config=source).spec.eos_token_ids == expected
    without = read(tmp_path, skip_tokenizer_init=True)
    assert without.tokenizer_path is None and 6 not in without.spec.eos_token_ids


def test_an_end_that_the_model_cannot_give_is_left_out(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [7, 512, 9999]}).spec.eos_token_ids == (7,)


def test_of_another_tokenizer_its_end_counts(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (other / "tokenizer.json").write_text('{"added_tokens": [{"id": 5, "content": "<end>"}]}')
    config = read(tmp_path, tokenizer=str(other))
    assert config.spec.eos_token_ids == (7, 5) and config.tokenizer_path == str(other)
    assert problem(tmp_path, tokenizer="./nowhere").startswith(
        "tokenizer: './nowhere' is not a folder"
    )
    assert "skip_tokenizer_init" in problem(
        tmp_path, tokenizer=str(other), skip_tokenizer_init=True
    )


# Sampling.

GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": None,
    "max_new_tokens": 99,
    "repetition_penalty": 1.05,
    "eos_token_id": [1],
    "transformers_version": "4.51.0",
}


def test_generation_config_sets_the_defaults_of_sampling(tmp_path: Path) -> None:
    assert read(tmp_path).sampling_defaults == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    expected = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 99,
        "repetition_penalty": 1.05,
    }
    assert read(tmp_path).sampling_defaults == expected
    assert read(tmp_path, generation_config="vllm").sampling_defaults == {}
    assert read(tmp_path, generation_config="none").sampling_defaults == {}
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.2, "eos_token_id": 9}')
    config = read(tmp_path, generation_config=str(other))
    assert config.sampling_defaults == {"temperature": 0.2} and config.spec.eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"temperature": 7}', "temperature: must be between 0 and 2, not 7"),
        ('{"top_k": "20"}', "top_k: must be"),
        ('{"eos_token_id": "x"}', "eos_token_id in generation_config.json"),
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
    ],
)
def test_a_generation_config_that_is_wrong_is_named(
    tmp_path: Path, content: str, words: str
) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    assert words in problem(tmp_path)
    if "temperature" in content:
        assert read(tmp_path, generation_config="none").sampling_defaults == {}


def test_a_folder_without_a_generation_config_is_refused(tmp_path: Path) -> None:
    assert problem(tmp_path, generation_config="/nowhere") == (
        "generation_config: /nowhere has no generation_config.json"
    )


def test_a_known_architecture_needs_no_look_at_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads a file of every package, before anything else of the engine starts."""

    def refuse(**_: object) -> None:
        raise AssertionError("packages were read")

    monkeypatch.setattr(metadata, "entry_points", refuse)
    assert read(tmp_path).spec.architecture == "Qwen3ForCausalLM"
