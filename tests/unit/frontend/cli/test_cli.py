"""The command line: a flag for every option, and errors in one line."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import sys
from collections.abc import AsyncGenerator
from dataclasses import fields
from typing import Any, ClassVar

import pytest

import sidestep
from sidestep import (
    CompletionOutput,
    EngineArgs,
    EngineDeadError,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from sidestep.__main__ import main as command
from sidestep.frontend.bench import bench as cli_bench
from sidestep.frontend.cli import generate as cli_generate
from sidestep.frontend.main import main, make_parser
from sidestep.frontend.options.flags import (
    sampling_params,
)
from sidestep.frontend.options.option_flags import flag_names


@pytest.mark.parametrize(
    "command",
    [
        ["generate"],
        ["chat"],
        ["bench", "throughput"],
        ["bench", "latency"],
        ["trace"],
        ["run-batch"],
    ],
)
def test_every_engine_option_is_a_flag_with_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(EngineArgs):
        if field.name == "seed" and command in (["generate"], ["chat"]):
            continue  # --seed sets the sampling parameter
        assert flag_names(field.name)[0] in text
        assert field.metadata["doc"].split(";")[0].split(".")[0][:25] in text


def test_flags_give_what_was_asked_for_and_defaults_otherwise() -> None:
    parsed = make_parser("1").parse_args(
        [
            "generate",
            "-tp",
            "2",
            "-pp",
            "2",
            "--pipeline-layers",
            "17,15",
            "--max-model-len",
            "1k",
            "--no-async-scheduling",
            "--kv-cache-memory-bytes",
            "2G",
            "--temperature",
            "0.5",
            "--seed",
            "7",
            "--stop",
            "a",
            "--stop",
            "b",
            "prompt",
        ]
    )
    assert EngineArgs.from_cli_args(parsed) == EngineArgs(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        pipeline_layers=(17, 15),
        max_model_len=1024,
        async_scheduling=False,
        kv_cache_memory_bytes=2 << 30,
    )
    assert sampling_params(parsed, max_tokens=64) == SamplingParams(
        temperature=0.5, stop=["a", "b"], seed=7, max_tokens=64
    )
    assert parsed.prompts == ["prompt"]


@pytest.mark.parametrize(
    "words",
    [["--nonsense"], ["--dtype", "int3"], ["--max-num-seqs", "many"], ["--pipeline-layers", "1;2"]],
)
def test_unknown_flags_and_values_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words, "x"])
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--temperature", "9", "x"], "sidestep: temperature: must be between 0 and 2, not 9.0\n"),
        (
            ["--max-num-batched-tokens", "1", "--max-num-seqs", "2", "x"],
            "sidestep: max_num_batched_tokens: 1 is less than max_num_seqs",
        ),
        (
            ["--model", "./nowhere", "x"],
            "sidestep: model: './nowhere' is not a folder, nor a hub name",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *words]) == 1
    err = [
        one
        for one in capsys.readouterr().err.splitlines(keepends=True)
        if one.startswith("sidestep: ")
    ]
    assert len(err) == 1 and err[0].startswith(line)


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sidestep", "--version"])
    with pytest.raises(SystemExit) as caught:
        command()
    assert (
        caught.value.code == 0 and capsys.readouterr().out == f"sidestep {sidestep.__version__}\n"
    )


def test_a_model_can_be_named_without_a_flag() -> None:
    parsed = make_parser("1").parse_args(["bench", "latency", "my/model", "--dtype", "float32"])
    assert EngineArgs.from_cli_args(parsed) == EngineArgs(model="my/model", dtype="float32")


class Engine:
    """A stand-in for AsyncLLM: it says the prompt's words, the shorter prompts first."""

    device = "fake"
    max_model_len = 1000
    sampling_defaults: ClassVar[dict[str, float]] = {}

    def __init__(self, death: str | None = None) -> None:
        self.death = death
        self.is_running = True
        self.params: list[SamplingParams] = []

    async def generate(
        self, prompt: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        self.params.append(params)
        words = prompt.split() if isinstance(prompt, str) else list(prompt)
        for number, word in enumerate(words, 1):
            await asyncio.sleep(0)
            if self.death is not None:
                raise EngineDeadError(self.death)
            assert params.output_kind == RequestOutputKind.DELTA
            metrics = RequestMetrics(0.0, first_token_ts=0.25, num_generation_tokens=number)
            last = number == len(words)
            yield RequestOutput(
                "", None, [1, 2], [CompletionOutput(0, f" {word}!", [3])], last, metrics
            )

    def get_tokenizer(self) -> Any:
        return argparse.Namespace(vocab_size=100)

    async def get_stats(self) -> dict[str, float]:
        return {}

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_running = False


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(cli_generate, "start_engine", lambda arguments: engine)
    monkeypatch.setattr(cli_bench, "start_engine", lambda arguments: engine)
    return engine


def test_prompts_are_printed_in_order_and_then_the_summary(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--max-tokens", "7", "a b c", "d"]) == 0
    out, err = capsys.readouterr()
    assert out == "a b c a! b! c!\n\nd d!\n", "headings and figures are not text"
    *headings, summary = err.splitlines()
    assert headings == ["--- 1", "--- 2"]
    assert (
        summary.startswith("2 requests, 4 tokens in ")
        and "TTFT 250 ms" in summary
        and "tokens/s" in summary
    )
    assert [p.max_tokens for p in engine.params] == [7, 7] and not engine.is_running


def test_prompts_come_from_standard_input_where_none_are_given(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b\n\nc\n"))
    assert main(["generate"]) == 0
    assert "a b a! b!\n" in capsys.readouterr().out and len(engine.params) == 2
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate"]) == 1
    assert (
        capsys.readouterr().err
        == "sidestep: prompts: none given, neither as arguments nor on standard input\n"
    )


def test_the_death_of_the_engine_is_one_line(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.death = "worker 0 was killed by SIGKILL"
    assert main(["generate", "a", "b"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "--- 1",
        "sidestep: worker 0 was killed by SIGKILL",
    ]


@pytest.mark.parametrize(
    ("kind", "figure"), [("throughput", "output_tokens_per_s"), ("latency", "mean_s")]
)
def test_a_benchmark_prints_a_table_or_json(
    engine: Engine, kind: str, figure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", kind, "--input-len", "5", "--output-len", "6"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert err == "", "progress is for terminals"
    table = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert table.keys() == result.keys() and float(table[figure]) >= 0 and result[figure] > 0
    assert result["device"] == "fake" and result["ttft_ms_p50"] == 250.0
    assert all(p.max_tokens in (6, 8) and p.ignore_eos for p in engine.params)


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_benchmark_shows_its_progress_on_a_terminal(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert main(["bench", "throughput", "--num-prompts", "7", "--json"]) == 0
    assert "/7 [" in terminal.getvalue() and json.loads(capsys.readouterr().out)["requests"] == 7


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--num-prompts", "0"], "num_prompts: must be at least 1"),
        (
            ["--input-len", "999", "--output-len", "2"],
            r"output_len: 2 and input_len \(999\) together are more than",
        ),
    ],
)
def test_a_benchmark_that_cannot_be_run_or_kept_says_why(
    engine: Engine, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "throughput", "--num-prompts", "1", *words]) == 1
    assert re.search(line, capsys.readouterr().err)
