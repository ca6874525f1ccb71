"""Flags that `vllm serve` has and `sidestep serve` has not.

They are parsed, so that an error can name the replacement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sidestep.ipc.vllm.foreign import Foreign

_SHORT = {
    "optimization_level": "-O",
    "compilation_config": "-cc",
}


def add_vllm_flags(parser: argparse.ArgumentParser, table: Mapping[str, Foreign]) -> None:
    """Add a flag for each name of a table that the command has no flag for.

    The help does not show these flags.
    """
    for name, foreign in table.items():
        flags = [
            flag
            for flag in (f"--{name.replace('_', '-')}", _SHORT.get(name))
            if flag is not None and flag not in parser._option_string_actions
        ]
        common: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if not flags:
            continue
        if foreign.form == "switch":
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        elif foreign.form == "list":
            parser.add_argument(*flags, nargs="*", **common)
        else:
            parser.add_argument(*flags, type=_value, **common)


def vllm_values(parsed: argparse.Namespace, table: Mapping[str, Foreign]) -> dict[str, Any]:
    """Return the names of a table that were given, with their values."""
    return {name: getattr(parsed, name) for name in table if hasattr(parsed, name)}


def with_dashes(words: Iterable[str]) -> list[str]:
    """Return a command line's words with dashes instead of underscores in the flags.

    `--max_model_len` becomes `--max-model-len`. Words after a bare `--` stay as they are.
    """
    made, are_flags = list[str](), True
    for word in words:
        are_flags = are_flags and word != "--"
        flag, equals, value = word.partition("=")
        made.append(
            flag.replace("_", "-") + equals + value if are_flags and flag.startswith("--") else word
        )
    return made


def _value(text: str) -> Any:
    """Return the value of a text that is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
