"""Every parser of tool calls and of reasoning.

It finds the same calls and reasoning however the text is cut.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from sidestep.frontend.parsers.events import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Parser,
    Reasoning,
)
from sidestep.ipc.common.registry import REASONING_PARSERS, TOOL_PARSERS, load

Found = list[tuple[str, ...]]
Make = Callable[[], Parser | AnswerParser]

HERMES = {
    "one call": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}\n</tool_call>',
        [("call", "add", '{"a": 1, "b": [2, "}"]}')],
    ),
    "text, then calls": (
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments": {"x": "\\"<"}, "name": "g"}</tool_call>\n',
        [("text", "Let me see."), ("call", "f", "{}"), ("call", "g", '{"x": "\\"<"}')],
    ),
    "text alone": (
        "a < b, and <tool is no mark\n\n",
        [("text", "a < b, and <tool is no mark\n\n")],
    ),
    "a mark without a call": (
        '<tool_call>{"city": 1}</tool_call>',
        [("text", '<tool_call>{"city": 1}</tool_call>')],
    ),
    "no JSON": ("<tool_call>hello</tool_call>", [("text", "<tool_call>hello</tool_call>")]),
    "cut in its name": ('<tool_call>{"name": "ad', [("text", '<tool_call>{"name": "ad')]),
    "cut in its arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "x',
        [("call", "f", '{"a": "x')],
    ),
    "no end mark": (
        '<tool_call>{"name": "f", "arguments": {"a": "x"}}',
        [("call", "f", '{"a": "x"}')],
    ),
    "no arguments": (
        '<tool_call>{"name": "f"}</tool_call>',
        [("text", '<tool_call>{"name": "f"}</tool_call>')],
    ),
    "text after a call": (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call> so',
        [("call", "f", "{}"), ("text", " so")],
    ),
}
LLAMA = {
    "one call": ('{"name": "f", "parameters": {"a": "{"}}', [("call", "f", '{"a": "{"}')]),
    "after the tag": (
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}',
        [("call", "f", "{}")],
    ),
    "several": (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": null}}',
        [("call", "f", "{}"), ("call", "g", '{"b": null}')],
    ),
    "text alone": ("The answer is {4}.", [("text", "The answer is {4}.")]),
    "an object that is no call": (
        '{"name": "Bob", "age": 3} ',
        [("text", '{"name": "Bob", "age": 3} ')],
    ),
    "cut": ('{"name": "f", "parameters": {"a"', [("call", "f", '{"a"')]),
    "cut in its name": ('{"name": "f', [("text", '{"name": "f')]),
}
MISTRAL = {
    "a list": (
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        [("call", "f", '{"a": [1]}'), ("call", "g", "{}")],
    ),
    "names": (
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": "]"}',
        [("call", "f", '{"a": 1}'), ("call", "g", '{"b": "]"}')],
    ),
    "an id": ("[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{}", [("call", "f", "{}")]),
    "text, then a call": (
        'Wait. [TOOL_CALLS] [{"name": "f", "arguments": {}}]',
        [("text", "Wait."), ("call", "f", "{}")],
    ),
    "text alone": ("see [TOOL] and [1]", [("text", "see [TOOL] and [1]")]),
    "a mark without a call": ("[TOOL_CALLS]!", [("text", "[TOOL_CALLS]!")]),
    "cut": ('[TOOL_CALLS]f[ARGS]{"a": ', [("call", "f", '{"a": ')]),
    "cut in its name": ("[TOOL_CALLS]get_w", [("text", "[TOOL_CALLS]get_w")]),
}
TOOL_CASES = {"hermes": HERMES, "qwen3": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL}

THINKING: dict[str, tuple[str, Found]] = {
    "both parts": (
        "<think>\nWell, a < b.\n</think>\n\nYes.",
        [("reasoning", "Well, a < b."), ("text", "Yes.")],
    ),
    "cut in the reasoning": ("<think>Well\n", [("reasoning", "Well")]),
    "nothing thought": ("<think>\n\n</think>\n\nYes. ", [("text", "Yes. ")]),
    "only thought": ("<think>a</think>", [("reasoning", "a")]),
}
INSIDE: dict[str, tuple[str, Found]] = {
    "already inside": ("Hm.\n</think>\nYes.", [("reasoning", "Hm."), ("text", "Yes.")]),
    "cut": (" Hm. </thi", [("reasoning", "Hm. </thi")]),
}
REASONING_CASES: dict[str, dict[str, tuple[str, str, Found]]] = {
    "qwen3": {
        **{name: ("user\nassistant\n", *case) for name, case in THINKING.items()},
        **{name: ("assistant\n<think>\n", *case) for name, case in INSIDE.items()},
        "no thinking": ("assistant\n", " \nYes.\n", [("text", " \nYes.\n")]),
        "thinking switched off": ("assistant\n<think>\n\n</think>\n\n", "Yes.", [("text", "Yes.")]),
    },
    "deepseek_r1": {
        **{name: ("<Assistant>", *case) for name, case in {**THINKING, **INSIDE}.items()},
        "switched off": ("<Assistant></think>", "Yes.", [("text", "Yes.")]),
    },
}


def joined(events: Iterable[Event]) -> Found:
    """Return the events joined, independent of how the text was cut."""
    found: list[list[str]] = []
    for event in events:
        kind = {Content: "text", Reasoning: "reasoning"}.get(type(event))
        if isinstance(event, CallBegin):
            found.append(["call", event.name, ""])
        elif isinstance(event, CallArguments):
            assert found[-1][0] == "call"
            found[-1][-1] += event.text
        elif kind is not None:
            assert not isinstance(event, CallBegin) and event.text, "an event without text"
            if not found or found[-1][0] != kind:
                found.append([kind, ""])
            found[-1][-1] += event.text
    return [tuple(each) for each in found]


def parse(make: Make, pieces: Iterable[str]) -> Found:
    parser, events = make(), list[Event]()
    for piece in pieces:
        events += parser.feed(piece)
    return joined(events + parser.finish())


def check_every_split(make: Make, text: str, expected: Found) -> None:
    assert parse(make, [text]) == expected
    assert parse(make, text) == expected, "character by character"
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        pieces = [text[:first], text[first:second], text[second:]]
        assert parse(make, pieces) == expected, pieces


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    return [
        pytest.param(name, *(case if isinstance(case, tuple) else (case,)), id=f"{name}: {title}")
        for name, rows in table.items()
        for title, case in rows.items()
    ]


@pytest.mark.parametrize(("name", "text", "expected"), cases(TOOL_CASES))
def test_a_tool_parser_finds_the_same_in_every_split(name: str, text: str, expected: Found) -> None:
    check_every_split(load(TOOL_PARSERS[name]), text, expected)


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), cases(REASONING_CASES))
def test_a_reasoning_parser_finds_the_same_in_every_split(
    name: str, prompt: str, text: str, expected: Found
) -> None:
    cls = load(REASONING_PARSERS[name])
    check_every_split(lambda: cls(prompt), text, expected)


def test_every_parser_is_tested() -> None:
    assert (
        TOOL_CASES.keys() == TOOL_PARSERS.keys()
        and REASONING_CASES.keys() == REASONING_PARSERS.keys()
    )


def test_calls_are_looked_for_in_the_answer_and_not_in_the_reasoning() -> None:
    text = (
        '<think>I could <tool_call>{"name": "f", "arguments": {}}</tool_call></think>\n'
        '<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>'
    )

    def make() -> AnswerParser:
        return AnswerParser(
            load(REASONING_PARSERS["qwen3"])("assistant\n"), load(TOOL_PARSERS["qwen3"])()
        )

    check_every_split(
        make,
        text,
        [
            ("reasoning", 'I could <tool_call>{"name": "f", "arguments": {}}</tool_call>'),
            ("call", "g", '{"a": 1}'),
        ],
    )


CALL = '{"name": "f", "arguments": {"a": 1}}'
TWO_CALLS = {"mistral": f"[TOOL_CALLS][{CALL}, {CALL}]", "llama3_json": f"{CALL}; {CALL}"}


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_calls_that_are_too_many_are_dropped(name: str) -> None:
    text = TWO_CALLS.get(name, f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    for most, kept in ((None, 2), (1, 1)):

        def make(most: int | None = most) -> AnswerParser:
            return AnswerParser(None, load(TOOL_PARSERS[name])(), most)

        check_every_split(make, text, [("call", "f", '{"a": 1}')] * kept)


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_arguments_are_told_before_their_end(name: str) -> None:
    text = {
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": "',
        "llama3_json": '{"name": "f", "parameters": {"a": "',
    }.get(name, '<tool_call>{"name": "f", "arguments": {"a": "')
    assert joined(load(TOOL_PARSERS[name])().feed(text)) == [("call", "f", '{"a": "')]


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_ids_of_calls_differ(name: str) -> None:
    cls = load(TOOL_PARSERS[name])
    ids = {cls.new_call_id() for _ in range(100)}
    assert len(ids) == 100
    if name == "mistral":
        assert all(len(i) == 9 and i.isalnum() for i in ids)


@pytest.mark.parametrize(
    "value", [{}, {"a": {"b": ["x", {"c": '\\ " } ] é'}]}, "n": -1.5e3, "t": True, "z": None}]
)
def test_arguments_come_back_as_they_were_written(value: dict[str, Any]) -> None:
    written = json.dumps(value, ensure_ascii=False)
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    check_every_split(load(TOOL_PARSERS["hermes"]), text, [("call", "f", written)])
