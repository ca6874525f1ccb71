"""The form that an output must have, checked where it is made: a wrong value fails at the call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.vllm.params import ParamsMeta

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_GRAMMAR_BYTES = 64 << 10
"""Most bytes of a schema, a regex, all choices or a grammar, as UTF-8."""
MAX_SCHEMA_DEPTH = 64
"""Most levels of nesting in a JSON schema."""
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """A grammar as the engine compiles it."""

    field: str
    """Name of the field in which the user gave it, such as 'structured_outputs.json'."""
    text: str
    """The grammar as JSON that llguidance reads."""


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, metaclass=ParamsMeta
):
    """The form of an output, in exactly one of the first six fields.

    Names are those that users of vLLM know. Raises ValidationError, which names the field.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as text or as a dict."""
    json_object: bool | None = None
    """True for any JSON object."""
    regex: str | None = None
    """A regular expression that matches the whole output. No look-around and no back-references."""
    choice: list[str] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's form, or in GBNF, llama.cpp's EBNF."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with parts that have a form, as text or as a dict.

    The dict is {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers":
    [...]}.
    """
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its parts."""
    reasoning_begin: str | None = None
    """Mark with which reasoning begins, given with reasoning_end.

    An output that begins with this mark begins with reasoning; another one is an answer.
    """
    reasoning_end: str | None = None
    """Mark after which the form holds, such as '</think>'; the text before it is free.

    Without reasoning_begin the mark must come.
    """

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValidationError(
                "structured_outputs",
                f"needs exactly one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}",
            )
        self._check(given[0])
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong(
                "disable_any_whitespace",
                f"must be True or False, not {self.disable_any_whitespace!r}",
            )
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise _wrong(
                "disable_any_whitespace", f"has a meaning only for JSON, not with {given[0]}"
            )
        for name in ("reasoning_begin", "reasoning_end"):
            if (mark := getattr(self, name)) is not None:
                _check_text(name, mark, str)
        if self.reasoning_begin is not None and self.reasoning_end is None:
            raise _wrong("reasoning_begin", "needs reasoning_end")

    def _check(self, name: str) -> None:
        value = getattr(self, name)
        if name == "json_object":
            if value is not True:
                raise _wrong(name, f"must be True, not {value!r}")
        elif name == "choice":
            if not isinstance(value, list | tuple) or not value:
                raise _wrong(name, f"must be a list of texts, not {value!r}")
            for text in value:
                _check_text(name, text, str)
            _check_size(name, "".join(value))
        elif name in ("json", "structural_tag"):
            _check_text(name, value, str | dict)
            _check_depth(name, self._schema(name))
        else:
            _check_text(name, value, str)

    @property
    def kind(self) -> str:
        """Name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))

    @property
    def json_schema(self) -> dict[str, Any]:
        """`json` or `json_object` as a schema."""
        return {"type": "object"} if self.json_object else self._schema("json")

    @property
    def tag(self) -> dict[str, Any]:
        """`structural_tag` as a dict."""
        return self._schema("structural_tag")

    def _schema(self, name: str) -> dict[str, Any]:
        value = getattr(self, name)
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise _wrong(
                    name, f"is not valid JSON: {str(error) or 'nested too deeply'}"
                ) from None
        if not isinstance(value, dict):
            raise _wrong(name, f"must be a JSON object, not {type(value).__name__}")
        return value


def grammar_limits() -> LLParserLimits:
    """Return the bounds on the cost of one grammar.

    They allow about a second of compiling, and 40 ms and some MB for a token. A schema with 400
    optional properties needs 4,000 items of the parser. In an ambiguous grammar the time of each
    item grows with their number: 5,000 take up to 140 ms, and the library's own bound is 50,000.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=100_000,
        max_lexer_states=50_000,
        step_max_items=4_200,
        verbose_errors=False,
    )


def first_line(problem: str) -> str:
    """Return the first line of the library's message: the rest is for the library's authors."""
    return next(iter(problem.strip().splitlines()), "the grammar cannot go on")


def _wrong(name: str, problem: str) -> ValidationError:
    return ValidationError(f"structured_outputs.{name}", problem)


def _check_text(name: str, value: object, kind: Any) -> None:
    """Raise ValidationError unless the value is text, or an object that JSON can hold.

    Its size must be within the bound.
    """
    if not isinstance(value, kind) or value == "":
        raise _wrong(
            name,
            f"must be text{' or a dict' if kind is not str else ''} and not empty, not {value!r}"[
                :200
            ],
        )
    if isinstance(value, str):
        _check_size(name, value)
        return
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(name, f"cannot be written as JSON: {error}") from None
    _check_size(name, text)


def _check_size(name: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _wrong(name, "is not valid text: it cannot be written as UTF-8") from None
    if size > MAX_GRAMMAR_BYTES:
        raise _wrong(name, f"has {size} bytes; {MAX_GRAMMAR_BYTES} are the most")


def _check_depth(name: str, value: object) -> None:
    level: list[object] = [value]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise _wrong(name, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value
