"""The maker of grammars from the forms that requests ask for.

Each grammar is compiled once here to see that it is right, without the model's tokens. This happens
in threads of its own, so that neither the event loop nor the tokeniser's threads wait for it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.structured_outputs_params import (
    Grammar,
    StructuredOutputsParams,
    first_line,
    grammar_limits,
)

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CHECK_S = 10.0
"""Seconds until a grammar is refused because it takes too long to compile."""
_MAX_GBNF = 8 << 10
"""Most characters of a grammar in GBNF.

A library in plain Python translates it.
"""
_REMEMBERED = 256
"""Number of grammars that are kept after they were found to be right."""
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""White space between the parts of JSON.

The limit makes a model that writes white space without end continue.
"""
_OPTIONS = "x-guidance"
_GBNF_RULE = re.compile(r"^\s*[a-zA-Z][\w-]*\s*::=", re.MULTILINE)


def make_grammar(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> Grammar:
    """Return the grammar of a form; special_tokens: ids by text. Raises ValidationError."""
    field = f"structured_outputs.{params.kind}"
    answer: dict[str, Any] = {"name": "answer", **_MAKERS[params.kind](params, field)}
    grammars = [answer]
    if params.reasoning_end is not None:
        outer = _after_reasoning(params.reasoning_begin, params.reasoning_end, special_tokens)
        grammars = [{"name": "output", "lark_grammar": outer}, answer]
    return Grammar(field, json.dumps({"grammars": grammars}, ensure_ascii=False))


def _after_reasoning(begin: str | None, end: str, special_tokens: Mapping[str, int]) -> str:
    """Return a grammar of text up to a mark, then the answer.

    A little white space may stand between them.
    """
    reasoning = "reasoning" if begin is None else "(SPACE begin reasoning)?"
    lines = [f"start: {reasoning} SPACE @answer", r"SPACE: /[ \n]{0,4}/"]
    if begin is not None:
        lines.append(f"begin: {literal(begin, special_tokens)}")
    if end in special_tokens:
        lines += [f"reasoning: TEXT {literal(end, special_tokens)}", r"TEXT: /(.|\n)*/"]
    else:
        mark = re.sub(r"[^a-zA-Z0-9_]", lambda found: f"\\x{{{ord(found[0]):X}}}", end)
        lines.append(rf"reasoning[lazy]: /(.|\n)*{mark}/")
    return "\n".join(lines)


def literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return a text in a Lark grammar, or the special token that has this text."""
    return (
        f"<[{special_tokens[text]}]>"
        if text in special_tokens
        else json.dumps(text, ensure_ascii=False)
    )


def _from_schema(params: StructuredOutputsParams, field: str) -> dict[str, Any]:
    return {
        "json_schema": schema_with_options(
            params.json_schema, field, spaced=not params.disable_any_whitespace
        )
    }


def schema_with_options(
    schema: dict[str, Any], field: str, *, spaced: bool = True
) -> dict[str, Any]:
    """Return a schema as the compiler takes it."""
    if _OPTIONS in schema:
        raise ValidationError(field, f"holds '{_OPTIONS}', which is no part of JSON Schema")
    options: dict[str, Any] = {
        "whitespace_flexible": spaced,
        "lenient": False,
        "coerce_one_of": False,
    }
    if spaced:
        options["whitespace_pattern"] = _WHITESPACE
    return {**schema, _OPTIONS: options}


def _from_regex(params: StructuredOutputsParams, field: str) -> dict[str, Any]:
    from llguidance import LLMatcher

    assert params.regex is not None
    return {
        "lark_grammar": json.loads(LLMatcher.grammar_from_regex(params.regex))["grammars"][0][
            "lark_grammar"
        ]
    }


def _from_choice(params: StructuredOutputsParams, field: str) -> dict[str, Any]:
    texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}


def _from_grammar(params: StructuredOutputsParams, field: str) -> dict[str, Any]:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = params.grammar
    assert text is not None
    if not _GBNF_RULE.search(text):
        return {"lark_grammar": text}
    if len(text) > _MAX_GBNF:
        raise ValidationError(
            field, f"has {len(text)} characters; {_MAX_GBNF} are the most in GBNF"
        )
    try:
        return {"lark_grammar": gbnf_to_lark(text)}
    except (
        Exception
    ) as error:  # the library raises its own errors, and Python's from inside its parser
        raise ValidationError(
            field, f"is not valid GBNF: {str(error) or type(error).__name__}"
        ) from None


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: dict[str, Any]
    end: str


class _StructuralTag(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="structural_tag"
):
    structures: list[_Structure]
    triggers: list[str]


def _from_tag(params: StructuredOutputsParams, field: str) -> dict[str, Any]:
    from llguidance import StructTag

    try:
        tag = msgspec.convert(params.tag, _StructuralTag)
    except msgspec.ValidationError as error:
        raise ValidationError(field, str(error)) from None
    tags = []
    for structure in tag.structures:
        trigger = next((t for t in tag.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise ValidationError(field, f"no trigger begins {structure.begin!r}")
        tags.append(
            StructTag(
                trigger=trigger,
                begin=structure.begin,
                end=structure.end,
                grammar=schema_with_options(structure.schema, field),
            )
        )
    if not tags:
        raise ValidationError(field, "has no structures")
    return {"lark_grammar": StructTag.to_grammar(tags, assume_special=False)}


_MAKERS = {
    "json": _from_schema,
    "json_object": _from_schema,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_tag,
}


class GrammarMaker:
    """The maker that makes and checks the grammars of one frontend."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads: ThreadPoolExecutor | None = None
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()

    async def make(self, params: StructuredOutputsParams) -> Grammar:
        """Return the grammar of a form; raises ValidationError, which names the field."""
        key = msgspec.json.encode(params)
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        if self._threads is None:
            self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CHECK_S):
                grammar = await loop.run_in_executor(
                    self._threads, _make_and_check, params, self._tokenizer.special_token_ids
                )
        except TimeoutError:
            raise ValidationError(
                f"structured_outputs.{params.kind}", f"takes longer than {CHECK_S:g} s to compile"
            ) from None
        self._known[key] = grammar
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return grammar


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _make_and_check(params: StructuredOutputsParams, special_tokens: Mapping[str, int]) -> Grammar:
    from llguidance import LLMatcher

    grammar = make_grammar(params, special_tokens)
    if problem := LLMatcher.validate_grammar(grammar.text, None, limits=grammar_limits()):
        raise ValidationError(grammar.field, problem)
    # Some limits are checked at the first token only. This tokenizer knows no special tokens.
    if not special_tokens or "<[" not in grammar.text:
        matcher = LLMatcher(_byte_tokenizer(), grammar.text, limits=grammar_limits(), log_level=0)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise ValidationError(grammar.field, first_line(matcher.get_error()))
    return grammar
