"""Flags of a command line, made from the fields of a class that declares options."""

from __future__ import annotations

import argparse
import functools
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any

from sidestep.ipc.common.options import Parser, split, value_types
from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.vllm.options import VALUES, translate_value

_ALIASES = {
    "quantization": ["-q"],
    "tensor_parallel_size": ["-tp"],
    "pipeline_parallel_size": ["-pp"],
    "data_parallel_size": ["-dp"],
    "enable_expert_parallel": ["-ep"],
    "model": ["-m"],
    "speculative_config": ["-sc"],
}


def flag_names(name: str) -> list[str]:
    """Return the flags of a field, the long one first."""
    return [f"--{name.replace('_', '-')}", *_ALIASES.get(name, [])]


def add_option_flags(
    group: argparse._ArgumentGroup, cls: type[Any], only: Collection[str] | None = None
) -> None:
    """Add a flag for each option of a class, or for those in `only`.

    Only flags that are given appear in the result, so the defaults stay with the class.
    """
    kinds = value_types(cls)
    for field in fields(cls):
        if only is not None and field.name not in only:
            continue
        assert field.default is not MISSING
        default = "the bundled model" if field.default == DEFAULT_MODEL else field.default
        doc = field.metadata["doc"]
        text = doc if "Default:" in doc or default is None else f"{doc} (default: {default})"
        kind = flag_type(kinds[field.name])
        parse = field.metadata["parse"] or (split if kind == list[str] else None)
        add_flag(group, field.name, kind, text, choices=field.metadata["choices"], parse=parse)


def option_values(parsed: argparse.Namespace, cls: type[Any]) -> dict[str, Any]:
    """Return the options of a class that were given, by name."""
    return {f.name: getattr(parsed, f.name) for f in fields(cls) if hasattr(parsed, f.name)}


def add_flag(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Any,
    text: str,
    *,
    choices: tuple[str, ...] | None = None,
    parse: Parser | None = None,
    dest: str | None = None,
) -> None:
    """Add the flag of one option.

    kind: the type of its values. parse: makes the value of a text, instead of the type. dest: the
    attribute of the result, if it is not the option's name.
    """
    # SUPPRESS: only flags that were given appear in the result, so defaults stay with the classes
    # that declare them.
    common: dict[str, Any] = {
        "dest": dest or name,
        "default": argparse.SUPPRESS,
        "help": text.replace("%", "%%"),
    }
    if kind is bool:
        group.add_argument(*flag_names(name), action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(kind) is list and parse is None:
        # The flag takes one value and may be repeated: a flag that takes several values would take
        # the prompts that follow too.
        common["help"] += "; may be given several times"
        (item,) = typing.get_args(kind)
        group.add_argument(
            *flag_names(name), action="append", type=item, metavar=name.upper(), **common
        )
    elif parse is split:
        common["help"] += "; several have commas between them, or a flag each"
        group.add_argument(
            *flag_names(name), action="extend", type=split, metavar=name.upper(), **common
        )
    else:
        if name in VALUES:
            parse = parse or functools.partial(translate_value, name)
        group.add_argument(
            *flag_names(name),
            type=kind if parse is None else telling(parse),
            choices=choices,
            metavar=None if choices else name.upper(),
            **common,
        )


def telling(parse: Parser) -> Parser:
    """Return a parser whose own error messages reach the user."""

    def told(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return told


def flag_type(kinds: tuple[Any, ...]) -> Any:
    """Return the type of one value on the command line.

    It is the list if there is one, else the first type that is not None.
    """
    lists = [kind for kind in kinds if typing.get_origin(kind) is list]
    return (lists or [kind for kind in kinds if kind is not type(None)])[0]
