"""Forms and their grammars; an error in a form names the field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sidestep import SamplingParams, StructuredOutputsParams, ValidationError
from sidestep.frontend.input.output_form import GrammarMaker, make_grammar
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.parsers.events import Function
from sidestep.frontend.parsers.think import DeepSeekR1ReasoningParser, Qwen3ReasoningParser
from sidestep.ipc.common.registry import TOOL_PARSERS, load
from sidestep.ipc.config_sections import DEFAULT_MODEL


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEFAULT_MODEL)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, ""),
        ({"json": {}, "regex": "a"}, ""),
        ({"json": "{"}, ".json"),
        ({"json": "[]"}, ".json"),
        ({"json": {"a": {1, 2}}}, ".json"),
        ({"json": {"a": float("nan")}}, ".json"),
        ({"json": ""}, ".json"),
        ({"json": {"description": "x" * 70_000}}, ".json"),
        ({"json": {"enum": ["\ud800"]}}, ".json"),
        ({"json_object": 1}, ".json_object"),
        ({"regex": ""}, ".regex"),
        ({"regex": b"a"}, ".regex"),
        ({"choice": "abc"}, ".choice"),
        ({"choice": []}, ".choice"),
        ({"choice": [1]}, ".choice"),
        ({"choice": ["x" * 1000] * 66}, ".choice"),
        ({"grammar": "x" * 70_000}, ".grammar"),
        ({"structural_tag": "nothing"}, ".structural_tag"),
        ({"regex": "a", "reasoning_begin": "<t>"}, ".reasoning_begin"),
        ({"regex": "a", "reasoning_end": ""}, ".reasoning_end"),
        ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_wrong_form_is_refused_where_it_is_made(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as raised:
        StructuredOutputsParams(**given)
    assert raised.value.field == f"structured_outputs{field}"


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        StructuredOutputsParams(yaml="a")  # type: ignore[call-arg]  # no such field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_what_a_form_cannot_go_with(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SamplingParams(**{"structured_outputs": StructuredOutputsParams(json={}), **given})
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"json": {"type": "thing"}}, "json"),
        ({"json": {"not": {}}}, "json"),
        ({"regex": "a("}, "regex"),
        (
            {"json": {"type": "integer", "multipleOf": 9999991, "minimum": 1, "maximum": 10**18}},
            "json",
        ),
        ({"grammar": "start: x"}, "grammar"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": "root ::= " + "(" * 3000}, "grammar"),
        ({"grammar": 'root ::= "' + "x" * 9000 + '"'}, "grammar"),
        (
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "triggers": ["<a"],
                    "structures": [{"begin": "<b>", "schema": {}, "end": ""}],
                }
            },
            "structural_tag",
        ),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_what_does_not_compile_is_refused_at_the_call(
    given: dict[str, Any], field: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValidationError) as raised:
        await GrammarMaker(tokenizer).make(StructuredOutputsParams(**given))
    assert raised.value.field == f"structured_outputs.{field}"


async def test_a_form_is_compiled_once(tokenizer: Tokenizer) -> None:
    maker = GrammarMaker(tokenizer)
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(40)}}
    first, other = await asyncio.gather(
        maker.make(StructuredOutputsParams(json=schema)),
        maker.make(StructuredOutputsParams(json=json.dumps(schema))),
    )
    assert first.text == other.text and first.field == "structured_outputs.json"
    assert await maker.make(StructuredOutputsParams(json=schema)) is first


@pytest.mark.parametrize("name", TOOL_PARSERS)
@pytest.mark.parametrize("most", [1, 3])
async def test_every_parser_s_grammar_of_calls_compiles(
    name: str, most: int, tokenizer: Tokenizer
) -> None:
    parser = load(TOOL_PARSERS[name])
    functions = [
        Function("a.b-c", None),
        Function("quo", {"type": "object", "properties": {'x"y': {"type": "null"}}}),
    ]
    text = parser.grammar(functions, most, lambda text: json.dumps(text))
    await GrammarMaker(tokenizer).make(StructuredOutputsParams(grammar=text))


def test_a_mark_that_is_a_special_token_is_written_as_one() -> None:
    params = StructuredOutputsParams(regex="a", reasoning_begin="<r>", reasoning_end="</r>")
    text = make_grammar(params, {"</r>": 7}).text
    assert "<[7]>" in text and '"<r>"' in json.loads(text)["grammars"][0]["lark_grammar"]


@pytest.mark.parametrize(
    ("parser", "prompt", "marks"),
    [
        (Qwen3ReasoningParser, "hi", ("<think>", "</think>")),
        (Qwen3ReasoningParser, "hi<think>\n", (None, "</think>")),
        (Qwen3ReasoningParser, "hi<think>\n\n</think>\n\n", None),
        (DeepSeekR1ReasoningParser, "hi", (None, "</think>")),
        (DeepSeekR1ReasoningParser, "hi</think>", None),
    ],
)
def test_reasoning_parsers_know_where_the_answer_begins(
    parser: Any, prompt: str, marks: Any
) -> None:
    assert parser(prompt).marks == marks
