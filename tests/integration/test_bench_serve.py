"""`sidestep bench serve` on the fake device, whose steps take a given time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep.frontend.main import main

COMMAND = ["bench", "serve", "--device", "fake", "--fake-step-ms", "2"]
LENGTHS = ["--input-len", "3:9", "--output-len", "4:8"]


def command(*words: str) -> list[str]:
    """Return the command's words. The lengths apply to random prompts only."""
    return [*COMMAND, *([] if "--dataset" in words else LENGTHS), *words]


Run = Callable[..., dict[str, float]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command and returns its report."""

    def run_command(*words: str) -> dict[str, float]:
        assert main(command("--json", *words)) == 0
        report: dict[str, float] = json.loads(capsys.readouterr().out)
        return report

    return run_command


def test_a_stream_of_requests_is_served_and_reported(run: Run) -> None:
    report = run(
        "--num-prompts", "30", "--request-rate", "100", "--goodput", "ttft:10000", "itl:10000"
    )
    assert (report["requests"], report["failed"], report["goodput_share"]) == (30, 0, 1.0)
    # Each token takes a step of 2 ms, and each request gives at least 4.
    assert report["ttft_ms_p50"] >= 2 and report["e2e_ms_p50"] >= 8
    assert report["device_busy_s"] > 0 and 0 <= report["device_idle_share"] < 1
    assert {"cpu_s_frontend", "cpu_s_core", "cpu_s_worker_0"} <= report.keys()


def test_no_more_requests_are_sent_than_may_run_at_a_time(run: Run) -> None:
    """With one request at a time nothing overlaps.

    On a device of 2 ms steps the whole takes at least the steps of each.
    """
    report = run("--num-prompts", "10", "--max-concurrency", "1", "--output-len", "5")
    assert report["seconds"] >= 10 * 5 * 0.002
    assert report["output_tokens_per_s"] <= 1 / 0.002


def test_requests_of_a_file_are_sent(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "requests.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": [1] * n, "output_len": n}) + "\n" for n in (2, 3, 4))
    )
    report = run("--dataset", str(data))
    assert report["requests"] == 3
    assert report["output_tokens_per_s"] * report["seconds"] == pytest.approx(9)
    assert report["total_tokens_per_s"] * report["seconds"] == pytest.approx(18)


def test_a_request_that_is_refused_fails_alone(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "requests.jsonl"
    data.write_text('{"prompt": [1], "output_len": 2}\n{"prompt": [999999999], "output_len": 2}\n')
    report = run("--dataset", str(data))
    assert (report["requests"], report["failed"]) == (2, 1)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--request-rate", "0"], "request_rate: must be above 0"),
        (["--num-prompts", "0"], "num_prompts: must be"),
        (["--max-concurrency", "0"], "max_concurrency: must be"),
        (["--goodput", "ttft"], "goodput: 'ttft' is not"),
        (["--goodput", "speed:3"], "goodput: unknown name 'speed'"),
        (["--input-len", "x"], "input_len: 'x' is neither"),
        (["--input-len", "99999999"], "output_len: 8 and input_len"),
        (["--dataset", "/nowhere"], "/nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*words)) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("sidestep: ") and line in shown
