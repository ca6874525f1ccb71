"""Options of `sidestep eval`: what has no meaning, or cannot be measured, is refused at start."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sidestep import EngineArgs, ValidationError
from sidestep.frontend.evaluation.command import evaluate
from sidestep.frontend.evaluation.subject import reference_arguments
from sidestep.frontend.evaluation.thresholds import LIMITS, Failure, failures
from sidestep.frontend.main import main
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.options.option_flags import flag_names


def test_every_option_is_a_flag_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in (*fields(EvalArgs), *fields(EngineArgs)):
        assert flag_names(field.name)[0] in text
        assert field.metadata["doc"].split(";")[0].split(".")[0][:25] in text
    assert "lower bound of the true divergence" in text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_kl": 0.1}, "max_kl"),
        ({"min_top1": 0.9}, "min_top1"),
        ({"max_perplexity_increase": 0.1}, "max_perplexity_increase"),
        ({"against_options": {"dtype": "float32"}}, "against_options"),
        ({"max_perplexity": 9.0, "needle": (64,)}, "max_perplexity"),
        ({"stride": 9, "json_validity": True}, "stride"),
        ({"min_needle": 1.0}, "min_needle"),
        ({"min_json": 1.0}, "min_json"),
        ({"min_json_free": 1.0}, "min_json_free"),
        ({"min_exact": 1.0}, "min_exact"),
        ({"min_exact": 1.1, "tasks": "x"}, "min_exact"),
        ({"max_perplexity": -1.0}, "max_perplexity"),
        ({"kl_tokens": 21}, "kl_tokens"),
        ({"context": 1}, "context"),
        ({"stride": 0}, "stride"),
        ({"needle": (64, 64)}, "needle"),
        ({"needle": (64,), "needle_depths": (101,)}, "needle_depths"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=f"^{field}: "):
        EvalArgs(**options)


def test_the_text_is_measured_by_default_and_where_it_is_given() -> None:
    assert EvalArgs().measures_text
    assert EvalArgs(text="x", tasks="y").measures_text
    assert not EvalArgs(tasks="y").measures_text
    assert EvalArgs(json_prompts="x").measures_json


@pytest.mark.parametrize(
    ("args", "engine", "message"),
    [
        ({}, {"device": "fake"}, "device: 'fake' has no log-probabilities"),
        ({}, {"skip_tokenizer_init": True}, "skip_tokenizer_init: "),
        ({}, {"max_num_queued_reqs": 3}, "max_num_queued_reqs: would refuse"),
        ({"context": 4096}, {}, "context: 4096 is more than 2047"),
        ({"context": 64, "stride": 64}, {}, "stride: 64 is more than the 63 tokens"),
        ({"needle": (4096,)}, {}, "needle: 4096 tokens, depth 0% has"),
        ({"needle": (8,)}, {}, "needle: 8 tokens are too few"),
        ({"json_validity": True, "max_tokens": 2048}, {}, "max_tokens: prompt 1, with format has"),
    ],
)
def test_an_evaluation_that_cannot_run_is_refused_before_an_engine_starts(
    args: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        evaluate(EvalArgs(**args), EngineArgs(**engine))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "answer": "b", "anwser": "c"}, "unknown field `anwser`"),
        ({"prompt": "a"}, "missing required field `answer`"),
        ({"answer": "b"}, "needs one of prompt and messages"),
        ({"prompt": "a", "messages": [], "answer": "b"}, "needs one of prompt and messages"),
        ({"prompt": "a", "answer": "b", "match": "like"}, "Invalid enum value 'like'"),
        ({"prompt": "a", "answer": "(", "match": "regex"}, "is no regex"),
        ({"prompt": "a", "answer": []}, "answer is empty"),
        ({"prompt": "a", "answer": "b", "max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": [{"role": "user"}], "answer": "b"}, "messages"),
    ],
)
def test_a_wrong_line_of_tasks_is_named(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n\n' + json.dumps(line) + "\n")
    with pytest.raises(ValidationError, match="^tasks: .*, line 3: ") as caught:
        evaluate(EvalArgs(tasks=str(file)), EngineArgs())
    assert message in str(caught.value)


def test_a_wrong_line_of_prompts_for_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "shema": {}}\n')
    with pytest.raises(ValidationError, match="^json_prompts: .*, line 1: .*`shema`"):
        evaluate(EvalArgs(json_prompts=str(file)), EngineArgs())


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff", "is not UTF-8"), (b"", "has no token that follows another")]
)
def test_a_file_that_is_no_text_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValidationError, match=f"^text: .*{message}"):
        evaluate(EvalArgs(text=str(tmp_path / "text")), EngineArgs())


def test_the_reference_has_the_options_of_the_model_with_changes() -> None:
    ours = EngineArgs(dtype="float32", cpu_threads=1)
    args = EvalArgs(against="b", against_options={"dtype": None, "cpu_threads": 2})
    assert reference_arguments(ours, args) == EngineArgs(model="b", cpu_threads=2)
    assert reference_arguments(ours, EvalArgs(against="b")) == ours.replace(model="b")
    for changes, message in (
        ({"dtpye": "float32"}, "dtpye: is not an option of the engine; did you mean dtype?"),
        ({"dtype": "int3"}, "dtype: 'int3' is not one of"),
        ({"model": "c"}, "holds model"),
    ):
        with pytest.raises(ValidationError) as caught:
            reference_arguments(ours, EvalArgs(against="b", against_options=changes))
        assert str(caught.value).startswith("against_options: ") and message in str(caught.value)


FIGURES: dict[str, Any] = {
    "model": {
        "perplexity": {"perplexity": 10.0},
        "needle": {"by_length": {"512": {"recall": 1.0}, "2048": {"recall": 0.6}}},
        "json": {"valid": 0.9, "valid_free": 0.5},
        "tasks": {"right": 0.7},
    },
    "comparison": {"perplexity_increase": 0.02, "kl_divergence": 0.01, "top1_agreement": 0.97},
}
EVERYTHING: dict[str, Any] = {
    **{"text": "t", "against": "b", "needle": (512, 2048), "json_validity": True, "tasks": "x"}
}


@pytest.mark.parametrize(
    ("option", "kept", "broken", "line"),
    [
        ("max_perplexity", 10, 9.9, "perplexity is 10, above --max-perplexity 9.9"),
        (
            "max_perplexity_increase",
            0.02,
            0.01,
            "perplexity_increase is 0.02, above --max-perplexity-increase 0.01",
        ),
        ("max_kl", 0.01, 0.009, "kl_divergence is 0.01, above --max-kl 0.009"),
        ("min_top1", 0.97, 0.98, "top1_agreement is 0.97, below --min-top1 0.98"),
        ("min_needle", 0.6, 0.7, "needle recall at 2048 is 0.6, below --min-needle 0.7"),
        ("min_json", 0.9, 1, "json valid is 0.9, below --min-json 1"),
        ("min_json_free", 0.5, 0.6, "json valid_free is 0.5, below --min-json-free 0.6"),
        ("min_exact", 0.7, 0.8, "tasks right is 0.7, below --min-exact 0.8"),
    ],
)
def test_limits(option: str, kept: float, broken: float, line: str) -> None:
    assert failures(EvalArgs(**{**EVERYTHING, option: kept}), FIGURES) == []
    found = failures(EvalArgs(**{**EVERYTHING, option: broken}), FIGURES)
    assert [str(failure) for failure in found] == [line]


def test_every_limit_is_a_figure() -> None:
    names = {f.name for f in fields(EvalArgs) if f.metadata["doc"].startswith("Fail ")}
    assert names == LIMITS.keys()


def test_a_figure_that_is_no_number_keeps_to_no_limit() -> None:
    figures = {"model": {"perplexity": {"perplexity": float("nan")}}}
    (found,) = failures(EvalArgs(max_perplexity=1e9), figures)
    assert isinstance(found, Failure) and found.option == "max_perplexity"
