"""SamplingParams: a wrong value fails where it is made, with its field's name."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from sidestep.ipc.transport.messages import AddRequest, decode_to_core, encode


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1025),
        ("n", True),
        ("n", "2"),
        ("best_of", 0),
        ("best_of", 1.5),
        ("best_of", 1025),
        ("temperature", -1),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 2),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.1),
        ("temperature_last", 1),
        ("seed", -2),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [7] * 129),
        ("stop_token_ids", "5"),
        ("ignore_eos", 1),
        ("detokenize", "no"),
        ("presence_penalty", 2.1),
        ("presence_penalty", None),
        ("frequency_penalty", -3),
        ("frequency_penalty", "1"),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e9),
        ("logit_bias", []),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", 4),
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("bad_words", [3]),
        ("bad_words", ["w"] * 129),
        ("bad_words", ["w" * 257]),
        ("repetition_detection", 3),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
        ("extra_args", []),
        ("extra_args", {1: 2}),
        ("skip_special_tokens", None),
        ("include_stop_str_in_output", 0),
        ("output_kind", "delta"),
        ("output_kind", 1),
    ],
)
def test_wrong_values(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_combinations() -> None:
    with pytest.raises(ValidationError, match="min_tokens: 9 is more than max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=3)
    with pytest.raises(ValidationError, match="stop: needs detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(
        ValidationError, match="best_of: must be a whole number between n \\(3\\) and 1024"
    ):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(ValidationError, match="best_of: is known only at the end"):
        SamplingParams(n=1, best_of=2, output_kind=RequestOutputKind.DELTA)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]  # the wrong name


def test_a_request_survives_the_wire() -> None:
    params = SamplingParams(
        temperature=0.5, stop=["a", "b"], seed=2**62, output_kind=RequestOutputKind.DELTA
    )
    message = AddRequest(
        client=1,
        handle=2,
        request_id="r",
        prompt_token_ids=b"\1\0\0\0",
        sampling=params,
        arrival=1.5,
    )
    assert decode_to_core(encode(message)) == message


def test_a_wrong_value_is_refused_also_when_it_comes_over_the_wire() -> None:
    good = SamplingParams(temperature=0.5)
    message = AddRequest(
        client=1, handle=2, request_id="r", prompt_token_ids=b"", sampling=good, arrival=0.0
    )
    data = bytearray(encode(message))
    at = data.index(b"\xcb\x3f\xe0")  # 0.5 as a msgpack float
    data[at + 1 : at + 3] = b"\xc0\x14"  # -5.0
    with pytest.raises(ValueError):
        decode_to_core(bytes(data))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_pattern_size", {"max_pattern_size": 0}),
        ("max_pattern_size", {"max_pattern_size": 129}),
        ("max_pattern_size", {"max_pattern_size": 2, "min_pattern_size": 3}),
        ("min_pattern_size", {"max_pattern_size": 2, "min_pattern_size": 0}),
        ("min_count", {"max_pattern_size": 2, "min_count": 1}),
    ],
)
def test_wrong_values_of_repetition_detection(field: str, values: dict[str, int]) -> None:
    with pytest.raises(ValidationError) as caught:
        RepetitionDetectionParams(**values)
    assert caught.value.field == f"repetition_detection.{field}"


@given(
    st.lists(st.integers(0, 2), max_size=24),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_repetition_is_found_where_it_is(
    tokens: list[int], size: int, more: int, count: int, first: int
) -> None:
    detection = RepetitionDetectionParams(
        min_pattern_size=size, max_pattern_size=size + more, min_count=count
    )
    output = tokens[first:]
    expected = any(
        len(output) >= n * count and output[-n * count :] == output[-n:] * count
        for n in range(size, size + more + 1)
    )
    assert detection.found_in(tokens, min(first, len(tokens))) == expected


def test_every_parameter_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "sampling.md").read_text()
    assert [name for name in SamplingParams.__struct_fields__ if f"`{name}`" not in text] == []
