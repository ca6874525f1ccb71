"""The option speculative_config from each source: flags, the environment and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sidestep.frontend.main import make_parser
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.ipc.common.errors import ValidationError

CONFIG = {"method": "ngram", "num_speculative_tokens": 3}
TEXT = json.dumps(CONFIG)


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", TEXT],
        [f"--speculative-config={TEXT}"],
        ["--speculative_config", TEXT],
        ["-sc", TEXT],
    ],
)
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_flag_takes_json(command: str, words: list[str]) -> None:
    parsed = make_parser("1").parse_args([command, *words])
    assert EngineArgs.from_cli_args(parsed).speculative_config == CONFIG


def test_the_environment_takes_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_SPECULATIVE_CONFIG", TEXT)
    assert (
        EngineArgs.from_cli_args(make_parser("1").parse_args(["serve"])).speculative_config
        == CONFIG
    )


@pytest.mark.parametrize(
    "text",
    [
        "speculative_config:\n  method: ngram\n  num_speculative_tokens: 3\n",
        f"speculative-config: '{TEXT}'\n",
    ],
)
def test_a_file_takes_a_mapping_or_json(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    parsed = make_parser("1").parse_args(["generate", "--config", str(file)])
    assert EngineArgs.from_cli_args(parsed).speculative_config == CONFIG


def test_text_that_is_no_object_is_refused_with_the_flag_s_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for text in ("ngram", "[1]"):
        with pytest.raises(SystemExit):
            make_parser("1").parse_args(["generate", "--speculative-config", text])
        told = capsys.readouterr().err
        assert "--speculative-config" in told and "JSON" in told


def test_a_wrong_field_is_named() -> None:
    parsed = make_parser("1").parse_args(["generate", "-sc", '{"model": "some/drafter"}'])
    with pytest.raises(ValidationError, match="speculative_config: model: drafts are looked up"):
        EngineArgs.from_cli_args(parsed)
