"""Sources of options: a flag overrides the environment, which overrides the file.

Errors name the source of a wrong value.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sidestep import EngineArgs
from sidestep.frontend.main import main, make_parser
from sidestep.frontend.options.flags import (
    check_url_flags,
    sampling_params,
)
from sidestep.frontend.options.option_flags import option_values
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.ipc.common.options import parse_mapping

PARSER = make_parser("1")


def parse(*words: str) -> Any:
    return PARSER.parse_args(words)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the first line of the error for a wrong command."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[0]


def test_a_flag_overrides_the_environment_which_overrides_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        "max_num_seqs: 1\nmax-num-batched-tokens: 100\nmax_model_len: 1k\nblock_size: 32\n"
    )
    monkeypatch.setenv("SIDESTEP_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("SIDESTEP_MAX_MODEL_LEN", "2k")
    parsed = parse("chat", "--max-num-seqs", "3", "--config", str(config))
    assert EngineArgs.from_cli_args(parsed) == EngineArgs(
        max_num_seqs=3, max_model_len=2048, max_num_batched_tokens=100, block_size=32
    )


def test_every_option_of_the_server_is_a_variable_and_a_key(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (EngineArgs, ServerArgs):
        for field in fields(cls):
            text = (
                (field.metadata["choices"] or ["7"])[0]
                if not isinstance(field.default, bool)
                else "true"
            )
            if field.metadata["parse"] is parse_mapping:
                text = '{"rope_scaling": {"factor": 4.0}}'
            monkeypatch.setenv(f"SIDESTEP_{field.name.upper()}", text)
            of_environment = option_values(parse("serve"), cls)
            monkeypatch.delenv(f"SIDESTEP_{field.name.upper()}")
            config.write_text(f"{field.name}: {text}\n")
            assert option_values(parse("serve", "--config", str(config)), cls) == of_environment
            assert list(of_environment) == [field.name]


def test_lists_and_switches_are_as_yaml_has_them(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(
        "served_model_name: [a, b]\nallowed_origins: https://x.example,https://y.example\n"
        "async_scheduling: off\nenforce_eager: true\ntool_call_parser: null\n"
    )
    parsed = parse("serve", "--config", str(config))
    assert option_values(parsed, ServerArgs) == {
        "served_model_name": ["a", "b"],
        "allowed_origins": ["https://x.example", "https://y.example"],
    }
    assert EngineArgs.from_cli_args(parsed) == EngineArgs(
        async_scheduling=False, enforce_eager=True
    )
    again = parse(
        "serve", "--config", str(config), "--async-scheduling", "--served-model-name", "c"
    )
    assert EngineArgs.from_cli_args(again).async_scheduling and again.served_model_name == ["c"]
    monkeypatch.setenv("SIDESTEP_SERVED_MODEL_NAME", "d,e")
    assert parse("serve", "--config", str(config)).served_model_name == ["d", "e"]


def test_the_environment_names_the_file_and_sets_sampling_options(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("temperature: 0\nstop: ['a, b', c]\n")
    monkeypatch.setenv("SIDESTEP_CONFIG", str(config))
    monkeypatch.setenv("SIDESTEP_SEED", "5")
    params = sampling_params(parse("generate", "x"))
    assert (params.temperature, params.stop, params.seed) == (0, ["a, b", "c"], 5)


def test_an_empty_file_and_an_empty_variable_set_nothing(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("# nothing\n")
    monkeypatch.setenv("SIDESTEP_DTYPE", "")
    assert EngineArgs.from_cli_args(parse("chat", "--config", str(config))) == EngineArgs()


def test_an_unknown_key_of_the_file_is_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text("max_num_seq: 1\n")
    said = refusal(capsys, "serve", "--config", str(config))
    assert (
        said
        == f"sidestep serve: {config}: unknown option 'max_num_seq'; did you mean max_num_seqs?"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("max_num_seqs: [", "is not YAML"),
        ("- max_num_seqs", "does not hold 'option: value' lines"),
        ("max_num_seqs: many", "invalid int value: 'many' (from "),
        ("no_enforce_eager: true", "unknown option"),
        ("config: other.yaml", "unknown option 'config'"),
        ("enforce_eager: maybe", "enforce_eager: 'maybe'"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(
    text: str, problem: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(text)
    assert problem in refusal(capsys, "serve", "--config", str(config))


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/nowhere/x.yaml" in refusal(capsys, "serve", "--config", "/nowhere/x.yaml")


def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDESTEP_BLOCK_SIZE", "big")
    assert refusal(capsys, "serve").endswith(
        "'big' (from the environment variable SIDESTEP_BLOCK_SIZE)"
    )


def test_a_value_that_is_found_wrong_later_is_named_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDESTEP_BLOCK_SIZE", "0")
    assert main(["chat"]) == 1
    assert capsys.readouterr().err == (
        "sidestep: block_size: must be at least 1, not 0 (from the environment "
        "variable SIDESTEP_BLOCK_SIZE)\n"
    )


def test_an_unknown_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDESTEP_MAX_NUM_SEQ", "1")
    assert refusal(capsys, "topology") == (
        "sidestep: unknown environment variable SIDESTEP_MAX_NUM_SEQ; did you mean "
        "SIDESTEP_MAX_NUM_SEQS?"
    )


def test_variables_of_kubernetes_services_are_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SIDESTEP_PORT": "tcp://10.0.0.1:80",
        "SIDESTEP_SERVICE_HOST": "10.0.0.1",
        "SIDESTEP_SERVICE_PORT": "80",
        "SIDESTEP_SERVICE_PORT_HTTP": "80",
        "SIDESTEP_PORT_80_TCP": "tcp://10.0.0.1:80",
        "SIDESTEP_PORT_80_TCP_ADDR": "10.0.0.1",
        "SIDESTEP_CHAT_SERVICE_HOST": "10.0.0.2",
        "SIDESTEP_CHAT_PORT": "tcp://10.0.0.2:80",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["topology"]) == 0
    assert not hasattr(parse("serve"), "port")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["serve", "--max-num-seq", "3"],
            "sidestep serve: unknown option --max-num-seq; did you mean --max-num-seqs?",
        ),
        (
            ["serve", "--max-num-seq=3"],
            "sidestep serve: unknown option --max-num-seq; did you mean --max-num-seqs?",
        ),
        (["serv"], "did you mean serve?"),
        (["bench", "latancy"], "did you mean latency?"),
        (
            ["serve", "--dtype", "bfloat"],
            "'bfloat' is not one of auto, bfloat16, float16, float32; did you mean bfloat16?",
        ),
        (
            ["serve", "--kv-cache-memory-bytes", "4X"],
            "'4X' is not a number of bytes, such as 512M or 4G",
        ),
        (["topology", "--bandwidth", "fast"], "'fast' is not a speed, such as 4800GB/s"),
        (["serve", "a", "b"], "sidestep serve: unexpected argument 'b'"),
    ],
)
def test_a_mistake_is_one_line_with_what_is_likely_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *words)


def test_options_of_the_engine_are_refused_with_a_url_unless_the_environment_sets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIDESTEP_DEVICE", "cpu")
    monkeypatch.setenv("SIDESTEP_API_KEY", "k")
    check_url_flags(parse("chat", "--url", "http://127.0.0.1:1"))
    check_url_flags(parse("chat"))
    assert main(["chat", "--url", "http://127.0.0.1:1", "--dtype", "float32"]) == 1
    assert "dtype: is for an engine that is started here" in capsys.readouterr().err
