"""Loads and their reports."""

from __future__ import annotations

import json
import math
from itertools import islice, pairwise
from pathlib import Path

import pytest

from sidestep.frontend.bench.load import Lengths, arrivals, random_requests, read_requests
from sidestep.frontend.bench.load_report import Sample, make_report, meets, percentile
from sidestep.ipc.common.errors import ValidationError


def test_lengths_are_a_number_or_a_range() -> None:
    assert Lengths.parse("64", "input_len") == Lengths(64, 64)
    assert Lengths.parse("64:512", "input_len") == Lengths(64, 512)


@pytest.mark.parametrize("text", ["", "a", "4:b", "0", "9:8", "-1:4"])
def test_other_lengths_are_refused_by_the_flag_s_name(text: str) -> None:
    with pytest.raises(ValidationError, match="^output_len: "):
        Lengths.parse(text, "output_len")


def test_the_same_seed_gives_the_same_requests_and_another_others() -> None:
    one, same, other = (
        random_requests(50, Lengths(3, 9), Lengths(2, 4), 100, seed) for seed in (1, 1, 2)
    )
    assert one == same != other
    assert {len(prompt) for prompt, _ in one} == set(range(3, 10)) and {
        length for _, length in one
    } == {2, 3, 4}
    assert all(0 <= token < 100 for prompt, _ in one for token in prompt)


def test_arrivals_keep_to_the_rate() -> None:
    assert list(islice(arrivals(4, poisson=False, seed=0), 5)) == [0, 0.25, 0.5, 0.75, 1.0]
    assert list(islice(arrivals(math.inf, poisson=False, seed=0), 3)) == [0, 0, 0]
    assert list(islice(arrivals(math.inf, poisson=True, seed=0), 3)) == [0, 0, 0]
    times = list(islice(arrivals(50, poisson=True, seed=3), 5001))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[-1] == pytest.approx(100, rel=0.05)
    # Among exponential gaps, 1 - 1/e are shorter than the mean.
    assert sum(gap < 0.02 for gap in gaps) / 5000 == pytest.approx(1 - 1 / math.e, abs=0.02)


def test_requests_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"prompt": "a b", "output_len": 3}\n\n'
        '{"prompt": [1, 2], "output_len": 4}\n'
        '{"prompt": "c", "output_len": 5}\n'
    )
    assert read_requests(str(file), 2) == [("a b", 3), ([1, 2], 4)]


def test_a_prompt_may_hold_the_line_ends_of_unicode(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    request = {"prompt": "one\u2028two\x85", "output_len": 3}
    file.write_text(json.dumps(request, ensure_ascii=False) + "\r\n", "utf-8")
    assert read_requests(str(file), 9) == [("one\u2028two\x85", 3)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2"),
        ('{"prompt": "a"}', "output_len"),
        ('{"prompt": 4, "output_len": 1}', "prompt"),
        ('{"prompt": "a", "output_len": 1, "max_tokens": 3}', "max_tokens"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(json.dumps({"prompt": "a", "output_len": 1}) + "\n" + line + "\n")
    with pytest.raises(ValidationError, match=problem) as caught:
        read_requests(str(file), 9)
    assert str(caught.value).startswith("dataset: ")


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValidationError, match="no requests"):
        read_requests(str(tmp_path / "empty"), 9)


def sample(
    sent: float = 10.0, arrivals: tuple[float, ...] = (10.5, 11.0, 12.0), tokens: int = 4
) -> Sample:
    return Sample(
        planned=sent - 0.25,
        sent=sent,
        arrivals=list(arrivals),
        num_input_tokens=6,
        num_output_tokens=tokens,
    )


def test_latencies_are_what_the_receiver_saw() -> None:
    one = sample()
    assert (one.ttft, one.e2e, one.tpot, one.itl) == (0.5, 2.0, 0.5, [0.5, 1.0])
    assert sample(arrivals=(11.0,), tokens=1).tpot is None


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({}, True),
        ({"ttft": 500}, True),
        ({"ttft": 499}, False),
        ({"itl": 1000}, True),
        ({"itl": 999}, False),
        ({"tpot": 500, "e2e": 2000}, True),
        ({"tpot": 500, "e2e": 1999}, False),
    ],
    ids=str,
)
def test_a_good_request_keeps_to_all_goals(goals: dict[str, float], good: bool) -> None:
    assert meets(sample(), goals) is good


def test_a_report_counts_what_was_served() -> None:
    failed = Sample(planned=10.0, sent=11.0, error="too long")
    report = make_report(
        [sample(), sample(12.0, (12.25, 14.0), 2), failed], begin=10.0, goals={"ttft": 300}
    )
    assert (report["requests"], report["failed"], report["seconds"], report["drain_s"]) == (
        3,
        1,
        4.0,
        2.0,
    )
    assert (
        report["requests_per_s"],
        report["output_tokens_per_s"],
        report["total_tokens_per_s"],
    ) == (0.5, 1.5, 4.5)
    assert report["send_lag_ms_p99"] == 1000.0
    assert (report["ttft_ms_mean"], report["ttft_ms_p50"], report["ttft_ms_p99"]) == (
        375.0,
        500.0,
        500.0,
    )
    assert (report["itl_ms_p50"], report["itl_ms_p99"]) == (1000.0, 1750.0)
    assert (report["goodput_share"], report["goodput_requests_per_s"]) == (1 / 3, 0.25)


def test_a_load_of_failures_has_a_report_too() -> None:
    failed = [Sample(planned=0, sent=0, error=error) for error in ("no", "late", "late")]
    assert make_report(failed, 0.0, {}) == {
        "requests": 3,
        "failed": 3,
        "failures": "2 x late; 1 x no",
    }


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, q) for q in (50, 90, 99)] == [51.0, 91.0, 100.0]
    assert percentile([3.0], 99) == 3.0
