"""The option speculative_config: its fields, and vLLM's names for them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.registry import PROPOSERS
from sidestep.ipc.model.speculative_config import SpeculativeConfig
from sidestep.ipc.vllm.speculation import METHOD_WORDS, NO_METHODS, SPECULATIVE_KEYS


def of(**values: Any) -> SpeculativeConfig:
    config = SpeculativeConfig.of(values)
    assert config is not None
    return config


def problem(**values: Any) -> str:
    """Return the message of an engine's option with these values."""
    with pytest.raises(ValidationError) as caught:
        EngineArgs(speculative_config=values)
    assert caught.value.field == "speculative_config"
    return str(caught.value)


def test_without_a_config_there_is_no_speculation() -> None:
    assert SpeculativeConfig.of(None) is None
    assert EngineArgs().create_engine_config().scheduler.speculation is None


def test_the_defaults_are_those_of_look_up() -> None:
    assert of() == of(method="ngram", num_speculative_tokens=4)
    assert of().lookup == (1, 5)
    assert of(prompt_lookup_max=1).lookup == (1, 1)
    assert of(prompt_lookup_min=7).lookup == (7, 7)


def test_text_in_python_is_json_as_on_the_command_line() -> None:
    text: Any = '{"method": "ngram_gpu", "num_speculative_tokens": 3}'
    config = EngineArgs(speculative_config=text).create_engine_config().scheduler.speculation
    assert config == of(num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_speculative_token": 3}, "num_speculative_token: is not a field; the fields are"),
        ({"num_speculative_token": 3}, "did you mean num_speculative_tokens?"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens must be from 1 to 7, not 8"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 7, not 0"),
        (
            {"num_speculative_tokens": "4"},
            "num_speculative_tokens: must be a whole number, not '4'",
        ),
        ({"method": "eagle9"}, "method: 'eagle9' is not one of ngram, frequent, synthetic"),
        ({"method": 3}, "method: must be a string, not 3"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be at least 1, not 0"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_max (3) is less than prompt_lookup_min (4)",
        ),
        ({"adaptive": 1}, "adaptive: must be True or False, not 1"),
        ({"synthetic_acceptance_rate": 1.5}, "synthetic_acceptance_rate must be from 0 to 1"),
        ({1: 2}, "1: is not a field"),
    ],
)
def test_a_wrong_field_is_named_after_the_option(values: Any, expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineArgs(speculative_config=values)
    assert str(caught.value).startswith("speculative_config: ") and expected in str(caught.value)


def test_no_key_of_vllm_is_one_of_ours() -> None:
    assert not {f.name for f in fields(SpeculativeConfig)} & SPECULATIVE_KEYS.keys()
    assert not PROPOSERS.keys() & (NO_METHODS.keys() | METHOD_WORDS.keys())
    assert set(METHOD_WORDS.values()) <= PROPOSERS.keys()


@pytest.mark.parametrize("name", SPECULATIVE_KEYS)
def test_a_key_of_vllm_is_taken_where_it_asks_for_nothing_and_named_otherwise(name: str) -> None:
    foreign = SPECULATIVE_KEYS[name]
    for value in (None, *foreign.accepted):
        assert of(**{name: value}) == of()
    assert problem(**{name: object()}) == f"speculative_config: {name}: {foreign.instead}"


@pytest.mark.parametrize("method", [None, *METHOD_WORDS])
def test_other_words_for_look_up(method: str | None) -> None:
    assert of(method=method) == of(method="ngram")


@pytest.mark.parametrize("method", NO_METHODS)
def test_a_method_that_needs_a_model_is_refused_in_words(method: str) -> None:
    told = problem(method=method)
    assert told == f"speculative_config: method: {method!r} {NO_METHODS[method]}"
    assert "'ngram'" in told
