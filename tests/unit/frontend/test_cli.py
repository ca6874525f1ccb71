"""The command line: a flag for every option, and errors in one line."""

from __future__ import annotations

from dataclasses import fields

import pytest

from sidestep import EngineArgs, SamplingParams
from sidestep.frontend.cli import main, make_parser
from sidestep.frontend.cli_args import engine_args, flag_names, sampling_params


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "throughput"], ["bench", "latency"]])
def test_every_engine_option_is_a_flag_with_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(EngineArgs):
        assert flag_names(field.name)[0] in text
        assert field.metadata["doc"].split(";")[0].split(".")[0][:25] in text


def test_flags_give_what_was_asked_for_and_defaults_otherwise() -> None:
    parsed = make_parser("1").parse_args(
        ["generate", "-tp", "2", "--max-model-len", "1k", "--no-async-scheduling", "--kv-cache-memory-bytes", "2G",
         "--temperature", "0.5", "--stop", "a", "b", "--seed", "7", "--", "prompt"])
    assert engine_args(parsed) == EngineArgs(tensor_parallel_size=2, max_model_len=1024, async_scheduling=False,
                                             kv_cache_memory_bytes=2 << 30)
    assert sampling_params(parsed, max_tokens=64) == SamplingParams(temperature=0.5, stop=["a", "b"], seed=7,
                                                                    max_tokens=64)
    assert parsed.prompts == ["prompt"]


@pytest.mark.parametrize("words", [["--nonsense"], ["--dtype", "int3"], ["--max-num-seqs", "many"]])
def test_unknown_flags_and_values_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", *words, "x"])
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(("words", "line"), [
    (["--temperature", "9", "x"], "sidestep: temperature: must be between 0 and 2, not 9.0\n"),
    (["--max-num-batched-tokens", "1", "x"], "sidestep: max_num_batched_tokens: 1 is less than max_num_seqs"),
    (["--model", "./nowhere", "x"], "sidestep: model: './nowhere' is not a folder, nor a hub name")])
def test_what_the_user_can_mend_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *words]) == 1
    err = [one for one in capsys.readouterr().err.splitlines(keepends=True) if one.startswith("sidestep: ")]
    assert len(err) == 1 and err[0].startswith(line)
