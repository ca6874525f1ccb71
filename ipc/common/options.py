"""Options: their declaration, and the conversion of a value from any source to the declared type.

A frozen dataclass that inherits `Options` and declares its fields with `option()` accepts the same
values from everywhere: the command line, the environment, a file and Python all end in
`Options.__post_init__`, which converts and checks them.
"""

from __future__ import annotations

import difflib
import json
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import field, fields
from functools import cache
from typing import Any

from sidestep.ipc.common.errors import ValidationError

Parser = Callable[[str], Any]
"""Function that converts the text that people write to a value. Raises ValueError."""


def option(
    default: Any, doc: str, *, choices: tuple[str, ...] | None = None, parse: Parser | None = None
) -> Any:
    """Declare an option: its default and its help text, and its choices or the parser of its text.

    A parser is for texts such as '32k'. It is applied to strings of every source, Python included.
    """
    return field(default=default, metadata={"doc": doc, "choices": choices, "parse": parse})


def require(condition: bool, name: str, problem: str) -> None:
    """Raise ValidationError for the option `name` unless the condition is true."""
    if not condition:
        raise ValidationError(name, problem)


def require_positive(section: object, *names: str) -> None:
    """Raise ValidationError if one of these options is neither None nor at least 1."""
    for name in names:
        value = getattr(section, name)
        require(value is None or value >= 1, name, f"must be at least 1, not {value!r}")


class Options:
    """Base of the classes whose fields are options.

    A subclass with further checks calls `super().__post_init__()` first; after that all values have
    the declared types.
    """

    def __post_init__(self) -> None:
        for f in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            given = getattr(self, f.name)
            value = convert(f.name, given, value_types(type(self))[f.name], f.metadata["parse"])
            choices = f.metadata["choices"]
            if choices is not None and value is not None and value not in choices:
                raise ValidationError(f.name, not_a_choice(value, choices))
            if value is not given:
                object.__setattr__(self, f.name, value)  # the class is frozen for all other code


def value_types(cls: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field of a class may have."""
    hashable: Any = cls
    return _value_types(hashable)


@cache
def _value_types(cls: type) -> dict[str, tuple[Any, ...]]:
    def members(hint: Any) -> tuple[Any, ...]:
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        return typing.get_args(hint) if is_union else (hint,)

    return {name: members(hint) for name, hint in typing.get_type_hints(cls).items()}


def convert(name: str, value: Any, wanted: tuple[Any, ...], parse: Parser | None = None) -> Any:
    """Return a value as one of the wanted types. Raises ValidationError, which names the option."""
    if isinstance(value, str) and parse is not None:
        try:
            value = parse(value)
        except ValueError as error:
            raise ValidationError(name, _problem(value, error)) from None
    for kind in wanted:
        made = _as_kind(value, kind)
        if made is not _REFUSED:
            return made
    described = " or ".join(_WORDS.get(_plain(kind), str(kind)) for kind in wanted)
    raise ValidationError(name, f"must be {described}, not {value!r}")


_REFUSED = object()


def _as_kind(value: Any, kind: Any) -> Any:
    """Return the value as this type, or _REFUSED.

    A bool counts as a number in Python, but not here.
    """
    plain = _plain(kind)
    if plain is bool or isinstance(value, bool):
        return value if plain is bool and isinstance(value, bool) else _REFUSED
    if plain is int and isinstance(value, numbers.Integral):
        return int(value)
    if plain is float and isinstance(value, numbers.Real):
        return float(value)
    if plain is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if plain in (list, tuple):
        return _as_items(value, plain, typing.get_args(kind))
    fits = plain is Any or (isinstance(plain, type) and isinstance(value, plain))
    return value if fits else _REFUSED


def _as_items(value: Any, kind: type, item_kinds: tuple[Any, ...]) -> Any:
    given = split(value) if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)):
        return _REFUSED
    items = [_as_kind(item, item_kinds[0]) if item_kinds else item for item in given]
    return _REFUSED if any(item is _REFUSED for item in items) else kind(items)


def _plain(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list of strings",
    tuple: "a list of whole numbers",
    dict: "a mapping",
    type(None): "None",
}


def _problem(text: str, error: ValueError) -> str:
    """Return the parser's own message, or a general one for errors of int() and float().

    Messages of int() and float() do not describe the option.
    """
    told = str(error)
    return (
        told
        if told and "literal" not in told and "convert" not in told
        else f"{text!r} cannot be understood"
    )


def split(text: str) -> list[str]:
    """Return the parts of a text that has commas between them."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_length(text: str) -> int | str:
    """Return the number of '8192' or '32k' (times 1024); 'auto' stays."""
    lowered = text.strip().lower()
    if lowered == "auto":
        return "auto"
    scale = 1024 if lowered.endswith("k") else 1
    try:
        return int(lowered.removesuffix("k")) * scale
    except ValueError:
        raise ValueError(f"{text!r} is not a number, one like '32k', or 'auto'") from None


def parse_bytes(text: str) -> int:
    """Return the number of '1073741824', '512M' or '4G' (powers of 1024)."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    lowered = text.strip().lower().removesuffix("ib").removesuffix("b")
    try:
        if lowered and lowered[-1] in units:
            return int(float(lowered[:-1]) * units[lowered[-1]])
        return int(lowered)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes, such as 512M or 4G") from None


def parse_ints(text: str) -> tuple[int, ...]:
    """Return the numbers of '17,15'."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of whole numbers, such as 17,15") from None


def parse_mapping(text: str) -> dict[str, Any]:
    """Return the mapping that is written as a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{text!r} is not a JSON object, such as {{"key": 1}}')
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the known name that is most like a wrong one, or ''."""
    likely = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {likely[0]}?" if likely else ""


def not_a_choice(value: object, choices: Iterable[str]) -> str:
    """Return the sentence that refuses a value which is none of the choices."""
    known = list(choices)
    return f"{value!r} is not one of {', '.join(known)}{did_you_mean(str(value), known)}"


def host_and_port(text: str) -> tuple[str, int]:
    """Return the parts of HOST:PORT; an IPv6 address has brackets. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)
