"""Options: Python takes the same values as the command line.

An error names an option whose value has another type.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import did_you_mean, parse_mapping
from sidestep.ipc.config_sections import CacheConfig, ParallelConfig


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("max_model_len", "32k", 32768),
        ("max_model_len", "auto", "auto"),
        ("max_model_len", 100, 100),
        ("kv_cache_memory_bytes", "4G", 4 << 30),
        ("kv_cache_memory_bytes", "1.5GiB", 3 << 29),
        ("kv_cache_memory_bytes", None, None),
        ("max_num_seqs", np.int64(8), 8),
        ("gpu_memory_utilization", 1, 1.0),
        ("gpu_memory_utilization", np.float32(0.5), 0.5),
        ("model", Path("a/b"), "a/b"),
        ("logits_processors", "m:A, m:B", ["m:A", "m:B"]),
        ("logits_processors", ("m:A",), ["m:A"]),
        ("enforce_eager", True, True),
    ],
)
def test_python_takes_what_the_help_promises(name: str, given: Any, expected: Any) -> None:
    made = getattr(EngineArgs(**{name: given}), name)
    assert made == expected and type(made) is type(expected)


@pytest.mark.parametrize("given", ["17,15", [17, 15], (17, 15)])
def test_layers_are_a_list_or_its_text(given: Any) -> None:
    assert EngineArgs(pipeline_layers=given, pipeline_parallel_size=2).pipeline_layers == (17, 15)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("enforce_eager", "false", "must be True or False, not 'false'"),
        ("enforce_eager", 1, "True or False, not 1"),
        ("enable_prefix_caching", None, "True or False"),
        ("max_num_seqs", "8", "whole number or None, not '8'"),
        ("max_num_seqs", 8.0, "whole number"),
        ("tensor_parallel_size", True, "whole number, not True"),
        ("gpu_memory_utilization", "0.9", "must be a number"),
        ("gpu_memory_utilization", False, "must be a number"),
        ("dtype", None, "must be a string, not None"),
        ("model", 3, "must be a string, not 3"),
        ("max_model_len", "lng", "'lng' is not a number, one like '32k', or 'auto'"),
        ("max_model_len", 0, "must be at least 1, not 0"),
        ("kv_cache_memory_bytes", "4X", "'4X' is not a number of bytes, such as 512M or 4G"),
        ("logits_processors", [1], "must be a list of strings"),
        ("logits_processors", 7, "must be a list of strings"),
        ("pipeline_layers", "1;2", "'1;2' is not a list of whole numbers"),
        (
            "dtype",
            "float33",
            "'float33' is not one of auto, bfloat16, float16, float32; did you mean float32",
        ),
        ("gpu_memory_utilization", 1j, "must be a number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(name: str, given: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem) as caught:
        EngineArgs(**{name: given})
    assert caught.value.field == name


def test_every_section_converts_by_itself() -> None:
    given: Any = {"kv_cache_memory_bytes": "1K", "gpu_memory_utilization": Fraction(1, 2)}
    assert CacheConfig(**given) == CacheConfig(
        kv_cache_memory_bytes=1024, gpu_memory_utilization=0.5
    )
    with pytest.raises(ValidationError, match="enforce_eager"):
        ParallelConfig(enforce_eager="no")  # type: ignore[arg-type]  # not a bool


def test_options_of_the_server_are_converted_too() -> None:
    given: Any = {"max_body_bytes": "1M", "allowed_origins": "https://a.example,https://b.example"}
    args = ServerArgs(**given)
    assert args.max_body_bytes == 1 << 20 and args.allowed_origins == [
        "https://a.example",
        "https://b.example",
    ]
    with pytest.raises(ValidationError, match="port: must be a whole number, not '80'"):
        ServerArgs(port="80")  # type: ignore[arg-type]  # not an int


def test_what_has_been_converted_reaches_another_process_as_it_is() -> None:
    layers: Any = "1,1"
    args = EngineArgs(max_model_len="1k", pipeline_layers=layers, pipeline_parallel_size=2)
    assert msgspec.json.decode(msgspec.json.encode(args), type=EngineArgs) == args


def test_mappings_are_json_objects() -> None:
    assert parse_mapping('{"a": [1]}') == {"a": [1]}
    for text in ("{a: 1}", "[1]"):
        with pytest.raises(ValueError, match="is not"):
            parse_mapping(text)


def test_suggestions_name_what_is_alike_and_nothing_else() -> None:
    assert (
        did_you_mean("--max-num-seq", ["--model", "--max-num-seqs"])
        == "; did you mean --max-num-seqs?"
    )
    assert did_you_mean("xyz", ["--model"]) == ""
