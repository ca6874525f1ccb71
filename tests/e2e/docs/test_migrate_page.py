"""docs/migrate-from-vllm.md: its tables equal the code's, and its examples work as written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.vllm_tables import BEGIN, OURS_ALONE, PAGE, tables
from sidestep.frontend.main import main, make_parser
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.flags import server_args
from sidestep.frontend.options.serve_options import ServerArgs

TEXT = PAGE.read_text()


def test_the_tables_are_those_of_the_code() -> None:
    assert TEXT.partition(BEGIN)[2] == f"\n{tables()}", "run `python -m scripts.vllm_tables`"


def test_what_is_ours_alone_is_an_option() -> None:
    assert {*ServerArgs.__dataclass_fields__, *EngineArgs.__dataclass_fields__} >= OURS_ALONE


def test_the_example_streams_and_completes(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace("()", '(device="fake")', 1).replace(
                "AsyncEngineArgs()", 'AsyncEngineArgs(device="fake")'
            ),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


def test_the_commands_are_understood() -> None:
    commands = re.findall(
        r"^(sidestep serve|python -m sidestep\.entrypoints\.openai\.api_server) (.*)$", TEXT, re.M
    )
    assert len(commands) == 2
    parsed = [make_parser("1").parse_args(["serve", *shlex.split(words)]) for _, words in commands]
    assert [EngineArgs.from_cli_args(each).model for each in parsed] == ["MODEL", "Qwen/Qwen3-0.6B"]
    assert [EngineArgs.from_cli_args(each).max_model_len for each in parsed] == [2048, None]
    assert [server_args(each).port for each in parsed] == [8000, 8000]


def test_the_sentence_is_what_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    (sentence,) = re.findall(r"^sidestep: code_revision: .*$", TEXT, re.M)
    assert main(["serve", "--code-revision", "main"]) == 1
    assert capsys.readouterr().err == f"{sentence}\n"
