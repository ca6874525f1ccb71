"""vLLM's names: a name with the same meaning is accepted.

Every other name gets one sentence that names it.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.common.errors import UnknownNameError, ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.vllm.calls import ARGUMENTS, METHODS, PROMPT_KEYS
from sidestep.ipc.vllm.foreign import Foreign, translate
from sidestep.ipc.vllm.imports import MODULES, NAMES
from sidestep.ipc.vllm.options import ENGINE_OPTIONS, SERVED_ONLY, SERVER_OPTIONS, VALUES
from sidestep.ipc.vllm.params import SAMPLING_FIELDS, STRUCTURE_FIELDS
from sidestep.ipc.vllm.speculation import NO_METHODS, SPECULATIVE_KEYS

ALL = {
    **ENGINE_OPTIONS,
    **SERVER_OPTIONS,
    **SERVED_ONLY,
    **SAMPLING_FIELDS,
    **STRUCTURE_FIELDS,
    **PROMPT_KEYS,
    **ARGUMENTS,
    **SPECULATIVE_KEYS,
}
PROPER = ("AsyncLLM", "FlexibleArgumentParser", "KV", "LLM", "LoRA", "TextPrompt", "VLLM_")
REFUSED = object()
"""A value that no entry accepts."""


def test_no_name_is_one_of_ours() -> None:
    engine, server = {f.name for f in fields(EngineArgs)}, {f.name for f in fields(ServerArgs)}
    assert not engine & (ENGINE_OPTIONS.keys() | SERVED_ONLY.keys())
    assert (
        not server & (ENGINE_OPTIONS.keys() | SERVER_OPTIONS.keys())
        and server >= SERVED_ONLY.keys()
    )
    assert not ENGINE_OPTIONS.keys() & SERVER_OPTIONS.keys()
    assert not SAMPLING_FIELDS.keys() & set(SamplingParams.__struct_fields__)
    assert not STRUCTURE_FIELDS.keys() & set(StructuredOutputsParams.__struct_fields__)
    assert VALUES.keys() <= engine


def test_each_sentence_is_short_and_goes_on_after_a_name() -> None:
    for text in (
        *(f.instead for f in ALL.values()),
        *METHODS.values(),
        *NO_METHODS.values(),
        *MODULES.values(),
        *NAMES.values(),
    ):
        assert not text[0].isupper() or text.startswith(PROPER)
        assert not text.endswith(".") and "\n" not in text and 3 <= len(text.split()) <= 32


def test_an_option_of_another_name_has_the_same_meaning() -> None:
    for name, foreign in ENGINE_OPTIONS.items():
        if foreign.same_as is not None:
            value: Any = {"normalize": True} if name == "override_pooler_config" else 7
            options: dict[str, Any] = {name: value}
            assert getattr(EngineArgs(**options), foreign.same_as) == value
            with pytest.raises(
                ValidationError, match=f"{name}: means the same as {foreign.same_as}"
            ):
                EngineArgs(**options | {foreign.same_as: value})


def test_an_engine_option_is_taken_where_it_asks_for_nothing_and_named_otherwise() -> None:
    for name, foreign in ENGINE_OPTIONS.items():
        if foreign.same_as is not None:
            continue
        for value in (None, *foreign.accepted):
            assert EngineArgs(**{name: value}) == EngineArgs()
        with pytest.raises(ValidationError) as caught:
            refused: dict[str, Any] = {name: REFUSED}
            EngineArgs(**refused)
        assert str(caught.value) == f"{name}: {foreign.instead}" and caught.value.field == name


def test_true_is_not_one_and_false_is_not_zero() -> None:
    foreign = Foreign("is not here", (0,))
    assert translate({"x": 0}, {"x": foreign}) == {}
    with pytest.raises(ValidationError, match="x: is not here"):
        translate({"x": False}, {"x": foreign})


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [(name, theirs, ours) for name, words in VALUES.items() for theirs, ours in words.items()],
)
def test_words_for_values(name: str, theirs: Any, ours: Any) -> None:
    assert EngineArgs(**{name: theirs}) == EngineArgs(**{name: ours})


def test_an_option_that_no_one_has_is_named_with_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError,
        match="tensor_paralel_size: is not an option of the engine; did you mean "
        "tensor_parallel_size",
    ):
        EngineArgs(tensor_paralel_size=2)  # type: ignore[call-arg]  # the wrong name
    with pytest.raises(ValidationError, match="host: is an option of `sidestep serve`"):
        EngineArgs(host="0.0.0.0")  # type: ignore[call-arg]  # not an option here


@pytest.mark.parametrize(
    ("cls", "needed", "table"),
    [
        (SamplingParams, {}, SAMPLING_FIELDS),
        (StructuredOutputsParams, {"choice": ["a"]}, STRUCTURE_FIELDS),
    ],
)
def test_fields_of_parameters(cls: Any, needed: dict[str, Any], table: dict[str, Foreign]) -> None:
    for name, foreign in table.items():
        for value in (None, *foreign.accepted):
            assert cls(**needed, **{name: value}) == cls(**needed)
        with pytest.raises(ValidationError) as caught:
            cls(**needed, **{name: REFUSED})
        assert str(caught.value) == f"{name}: {foreign.instead}"
    with pytest.raises(UnknownNameError, match=r"nonsense: is not a field of \w+$"):
        cls(**needed, nonsense=1)


def test_parameters_are_frozen_and_say_how_to_change_them() -> None:
    params = SamplingParams(temperature=0, stop=["a"])
    with pytest.raises(AttributeError, match=r"params = params.clone\(max_tokens=...\)"):
        params.max_tokens = 5  # type: ignore[misc]  # frozen
    with pytest.raises(AttributeError, match="StructuredOutputsParams is frozen"):
        StructuredOutputsParams(regex="a").regex = "b"  # type: ignore[misc]  # frozen
    longer = params.clone(max_tokens=5)
    assert (
        longer == SamplingParams(temperature=0, stop=["a"], max_tokens=5)
        and longer.stop is not params.stop
    )
    assert params.clone() == params == pickle.loads(pickle.dumps(params)) == copy.deepcopy(params)
    with pytest.raises(ValidationError, match="max_tokens"):
        params.clone(max_tokens=0)


def test_numbers_of_numpy_are_python_s() -> None:
    numbers: dict[str, Any] = {
        "n": np.int64(2),
        "temperature": np.float32(0.5),
        "seed": np.uint32(3),
        "ignore_eos": np.bool_(True),
        "stop_token_ids": np.array([1, 2]),
        "allowed_token_ids": (np.int32(4), 5),
        "logit_bias": {np.int64(4): np.float64(1.5)},
    }
    params = SamplingParams(**numbers)
    assert params == SamplingParams(
        n=2,
        temperature=0.5,
        seed=3,
        ignore_eos=True,
        stop_token_ids=[1, 2],
        allowed_token_ids=[4, 5],
        logit_bias={4: 1.5},
    )
    assert type(params.n) is int and type(params.temperature) is float and params.ignore_eos is True
    assert [type(token) for token in params.allowed_token_ids or ()] == [int, int]


def test_other_forms_of_values() -> None:
    assert SamplingParams(seed=-1).seed is None
    choice: Any = {"choice": ["a"]}
    params = SamplingParams(structured_outputs=choice)
    assert params.structured_outputs == StructuredOutputsParams(choice=["a"])
    made = SamplingParams.from_optional(
        temperature=None, top_p=0.5, output_kind=RequestOutputKind.DELTA
    )
    assert made == SamplingParams(top_p=0.5, output_kind=RequestOutputKind.DELTA)


def test_all_of_the_vocabulary_is_refused_in_words() -> None:
    with pytest.raises(
        ValidationError, match="logprobs: -1 asks for all tokens of the vocabulary; at most 20"
    ):
        SamplingParams(logprobs=-1)
