"""Prompts of needles, JSON and tasks, and the scores of their outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep import CompletionOutput, EngineArgs, RequestMetrics, RequestOutput
from sidestep.frontend.evaluation.json_validity import JsonValidity, is_json
from sidestep.frontend.evaluation.needle import Needle, needle_number
from sidestep.frontend.evaluation.report import Report
from sidestep.frontend.evaluation.subject import MODEL, Subject
from sidestep.frontend.evaluation.tasks import Tasks
from sidestep.frontend.evaluation.units import Suite, Unit
from sidestep.frontend.options.eval_options import EvalArgs


def load(args: EvalArgs) -> Subject:
    return Subject.load(MODEL, EngineArgs(), args)


def said(unit: Unit, text: str) -> Any:
    """Return the result of a unit whose output is this text."""
    completion = CompletionOutput(0, text, [3], "stop")
    return unit.score(RequestOutput("", None, unit.prompt, [completion], True, RequestMetrics(0.0)))


def figures(suite: Suite, outputs: dict[str, str]) -> Any:
    """Return a suite's figures of outputs by unit."""
    args = EvalArgs(tasks="unused")
    units = {unit.name: unit for unit in suite.units(load(args))}
    return suite.figures({name: said(units[name], text) for name, text in outputs.items()})


@pytest.mark.parametrize("form", ["text", "chat"])
def test_a_needle_is_at_its_depth_of_a_prompt_of_its_length(form: str) -> None:
    args = EvalArgs(needle=(128, 512), needle_depths=(0, 50, 100), prompt_form=form)
    subject = load(args)
    units = Needle(args).units(subject)
    assert len(units) == 6
    for unit, (length, depth) in zip(
        units, [(n, d) for n in (128, 512) for d in (0, 50, 100)], strict=True
    ):
        assert length - 40 <= len(unit.prompt) <= length, "one sentence more would be too many"
        text = subject.tokenizer.decode(unit.prompt)
        number = needle_number(length, depth)
        assert text.count(number) == 1 and text.count("secret number of") == 2
        assert ("<|im_start|>" in text) == (form == "chat")
        place = text.index(number) / len(text)
        assert abs(place - depth / 100) < 0.35
        assert said(unit, f" {number}.")["found"]
        assert not said(unit, f" {number}1.")["found"]
        assert not said(unit, " none")["found"]


def test_the_recall_is_told_by_length() -> None:
    args = EvalArgs(needle=(128, 256), needle_depths=(0, 100))
    names = [f"{n} tokens, depth {d}%" for n in (128, 256) for d in (0, 100)]
    outputs = dict.fromkeys(names, "nothing") | {names[0]: needle_number(128, 0)}
    found = figures(Needle(args), outputs)
    assert found["recall"] == 0.25
    assert {n: one["recall"] for n, one in found["by_length"].items()} == {"128": 0.5, "256": 0.0}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": 1}', True),
        (" [1]\n", True),
        ("{}{}", False),
        ('```json\n{"a": 1}\n```', False),
        ('{"a": NaN}', False),
        ("7", False),
        ('{"a": ', False),
        ("", False),
    ],
)
def test_valid_json_is_an_object_or_an_array_alone(text: str, valid: bool) -> None:
    assert is_json(text) is valid


def test_each_prompt_for_json_is_sent_with_and_without_the_format(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    file.write_text(f'{{"prompt": "x", "schema": {json.dumps(schema)}}}\n{{"prompt": "y"}}\n')
    suite = JsonValidity(EvalArgs(json_prompts=str(file)))
    forms = {u.name: u.params.structured_outputs for u in suite.units(load(EvalArgs()))}
    assert forms["line 1, without format"] is forms["line 2, without format"] is None
    first, second = forms["line 1, with format"], forms["line 2, with format"]
    assert first is not None and first.json == schema
    assert second is not None and second.json_object
    outputs = dict.fromkeys(forms, "{}") | {"line 2, without format": "Sure: {}"}
    assert figures(suite, outputs) == {"valid": 1.0, "valid_free": 0.5, "prompts": 2}


TASKS: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "Paris"},
    {"prompt": "a", "answer": ["4", "four"], "match": "contains", "max_tokens": 3},
    {"messages": [{"role": "user", "content": "b"}], "answer": r"^\d+$", "match": "regex"},
]


def test_answers_are_matched_exactly_as_parts_or_by_a_regex(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("\n".join(map(json.dumps, TASKS)))
    args = EvalArgs(tasks=str(file), max_tokens=9)
    units = Tasks(args).units(load(args))
    assert [unit.params.max_tokens for unit in units] == [9, 3, 9]
    assert all(unit.params.temperature == 0 for unit in units)
    for unit, right, wrong in zip(
        units,
        ([" Paris\n"], ["It is four.", "4"], ["12"]),
        (["Paris.", "paris"], ["five"], ["12 "]),
        strict=True,
    ):
        assert all(said(unit, text)["right"] for text in right)
        assert not any(said(unit, text)["right"] for text in wrong)
    found = figures(Tasks(args), {"line 1": "Paris", "line 2": "5", "line 3": "x"})
    assert found["right"] == pytest.approx(1 / 3)
    assert found["wrong"] == ["line 2", "line 3"] and found["tasks"] == 3


def test_the_table_has_a_column_for_each_model() -> None:
    report = Report(
        "a",
        "b",
        {"model": "cpu", "against": "gpu"},
        {},
        {
            "model": {
                "perplexity": {"perplexity": 2.0, "tokens": 7},
                "needle": {"recall": 0.5, "by_length": {"512": {"recall": 0.5}}},
                "tasks": {"right": 0.0, "wrong": ["line 1", "line 4"]},
            },
            "against": {"perplexity": {"perplexity": 1.5, "tokens": 7}},
            "comparison": {"kl_divergence": float("inf")},
        },
        [],
    )
    assert report.lines() == [
        "model: a, cpu",
        "against: b, gpu",
        "                           model  against",
        "perplexity                     2      1.5",
        "perplexity tokens              7        7",
        "needle recall                0.5",
        "needle recall, 512 tokens    0.5",
        "tasks right                    0",
        "kl_divergence                inf",
        "wrong tasks: line 1, line 4",
    ]
    assert json.loads(report.to_json())["figures"]["comparison"] == {"kl_divergence": None}
