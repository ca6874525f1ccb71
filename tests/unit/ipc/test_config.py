"""Configuration: impossible combinations fail before any process starts, by the field's name."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.common.options import parse_bytes, parse_length
from sidestep.ipc.config_sections import ParallelConfig, SchedulerConfig
from sidestep.ipc.model.layer_spec import ExpertsSpec, attention_of
from sidestep.ipc.model.layer_split import split_layers
from sidestep.ipc.model.model_spec import load_model_spec
from tests.fakes import LAYER

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": [1, 2],
}


def write(folder: Path, **changes: Any) -> str:
    config = {**LLAMA, **changes}
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    return str(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int3"),
        ("load_format", "magic"),
        ("load_format", "npcache"),
        ("tokenizer_mode", "slow"),
        ("tokenizer_mode", "mistral"),
        ("device", "abacus"),
        ("block_size", 0),
        ("max_num_seqs", -1),
        ("gpu_memory_utilization", 1.5),
        ("tensor_parallel_size", 0),
        ("pipeline_parallel_size", 0),
        ("pipeline_layers", (3, 2)),
        ("scheduling_policy", "lottery"),
        ("max_model_len", "long"),
        ("fake_step_ms", 3.0),
        ("fake_faults", {"faults": []}),
        ("num_kv_blocks", 0),
        ("max_num_batched_tokens", True),
        ("stream_interval", 0),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineArgs(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineArgs(max_num_sequences=3)  # type: ignore[call-arg]  # the wrong name


def test_budget_below_batch_is_refused() -> None:
    with pytest.raises(
        ValidationError, match="max_num_batched_tokens: 10 is less than max_num_seqs"
    ):
        EngineArgs(max_num_batched_tokens=10, max_num_seqs=20)


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        ({}, "cpu", (256, 2048, 512)),
        ({}, "fake", (256, 2048, 512)),
        ({}, "cuda", (512, 8448, 1024)),
        ({"max_num_seqs": 9000}, "cuda", (9000, 9000, 18000)),
        ({"max_num_batched_tokens": 100}, "cpu", (100, 100, 200)),
        ({"max_num_seqs": 4, "async_scheduling": False}, "cuda", (4, 8448, 4)),
    ],
    ids=str,
)
def test_limits_that_were_not_asked_for_follow_the_device(
    given: Any, device: str, expected: tuple[int, ...]
) -> None:
    limits = SchedulerConfig(**given).limits(device)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.num_slots) == expected


def test_a_step_of_a_model_with_experts_takes_more_tokens_on_a_gpu() -> None:
    mlp = ExpertsSpec(num_experts=4, num_chosen=2, width=8)
    experts = msgspec.structs.replace(LAYER, mlp=mlp)
    for layers, tokens in (((LAYER,), 8448), ((LAYER, experts), 16896)):
        assert SchedulerConfig().limits("cuda", 1, layers).max_num_batched_tokens == tokens
        assert SchedulerConfig().limits("cpu", 1, layers).max_num_batched_tokens == 2048
        given = SchedulerConfig(max_num_batched_tokens=700)
        assert given.limits("cuda", 1, layers).max_num_batched_tokens == 700


@pytest.mark.parametrize(
    ("size", "changes"),
    [(3, {}), (8, {}), (4, {"num_key_value_heads": 3, "num_attention_heads": 12})],
)
def test_a_tensor_parallel_size_that_does_not_fit_the_model_is_refused(
    tmp_path: Path, size: int, changes: Any
) -> None:
    with pytest.raises(ValidationError, match="tensor_parallel_size"):
        EngineArgs(
            model=write(tmp_path, **changes), tensor_parallel_size=size
        ).create_engine_config()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"pipeline_parallel_size": 3},
            "pipeline_parallel_size: 3 is more than the model's 2 layers",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": (1, 2)},
            "pipeline_layers: .* 3 layers, the model has 2",
        ),
        (
            {"pipeline_parallel_size": 2, "pipeline_layers": (2, 0)},
            "pipeline_layers: each stage needs a layer",
        ),
    ],
)
def test_stages_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, options: Any, problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        EngineArgs(model=write(tmp_path), **options).create_engine_config()


def test_ranks_are_named_by_what_they_have(tmp_path: Path) -> None:
    parallel = (
        EngineArgs(
            model=write(tmp_path, num_hidden_layers=5),
            pipeline_parallel_size=2,
            tensor_parallel_size=2,
            pipeline_layers=(2, 3),
        )
        .create_engine_config()
        .parallel
    )
    spec = load_model_spec(str(tmp_path))
    assert [parallel.stage(spec, rank).layers for rank in range(4)] == [range(2)] * 2 + [
        range(2, 5)
    ] * 2
    assert parallel.rank_name(2) == "worker 2 (stage 1, tp rank 0)"
    assert ParallelConfig().rank_name(0) == "worker 0"


def test_stages_without_numbers_of_layers_take_about_equally_long(tmp_path: Path) -> None:
    llama_8b = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    spec = load_model_spec(write(tmp_path, **llama_8b))
    assert [split_layers(spec, n) for n in (1, 2, 4)] == [(32,), (17, 15), (9, 8, 8, 7)], (
        "the head is 1.5 layers"
    )
    for count in range(1, 33):
        layers = split_layers(spec, count)
        assert sum(layers) == 32 and len(layers) == count and min(layers) >= 1


def test_max_model_len_beyond_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="max_model_len: 300 is more than the model's 256"):
        EngineArgs(model=write(tmp_path), max_model_len=300).create_engine_config()


def test_sections_hold_what_was_given(tmp_path: Path) -> None:
    config = EngineArgs(
        model=write(tmp_path),
        max_num_seqs=3,
        block_size=32,
        max_model_len=100,
        async_scheduling=False,
    ).create_engine_config()
    assert (config.scheduler.max_num_seqs, config.cache.block_size, config.max_model_len) == (
        3,
        32,
        100,
    )
    assert config.scheduler.limits("cpu").max_steps_in_flight == 1
    assert config.spec.eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["BertModel"]},
            "BertModel is not supported; supported are ",
        ),
        (
            {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.Own"}},
            "OwnForCausalLM is not supported, and its own code (auto_map) is never run here",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization 'hqq'"),
        ({"torch_dtype": "float8"}, "dtype 'float8'"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(EngineStartError) as caught:
        EngineArgs(model=write(tmp_path, **changes)).create_engine_config()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_model_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="not a folder, nor a hub name"):
        EngineArgs(model="./nothing-here").create_engine_config()
    with pytest.raises(EngineStartError, match="has no config.json"):
        EngineArgs(model=str(tmp_path)).create_engine_config()


def test_generation_config_names_the_stop_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert EngineArgs(model=str(tmp_path)).create_engine_config().spec.eos_token_ids == (7,)


def test_windows_follow_the_family(tmp_path: Path) -> None:
    def windows(**changes: Any) -> tuple[int, ...]:
        spec = EngineArgs(model=write(tmp_path, **changes)).create_engine_config().spec
        return tuple(mixer.window for mixer in attention_of(spec.layers))

    assert windows(architectures=["MistralForCausalLM"], sliding_window=8) == (8, 8)
    assert windows(architectures=["MistralForCausalLM"]) == (0, 0)
    assert windows(architectures=["Qwen2ForCausalLM"], sliding_window=8) == (0, 0)
    assert windows(
        architectures=["Qwen2ForCausalLM"],
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=1,
    ) == (0, 8)


def test_lengths_and_sizes_as_people_write_them() -> None:
    assert [parse_length(t) for t in ("8192", "32k", "auto")] == [8192, 32768, "auto"]
    assert [parse_bytes(t) for t in ("1024", "2K", "1.5G", "4GiB")] == [
        1024,
        2048,
        3 << 29,
        4 << 30,
    ]
