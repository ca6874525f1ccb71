"""Grammars of calls, in Lark's form, that the parsers here read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sidestep.frontend.input.output_form import schema_with_options
from sidestep.frontend.parsers.events import Function

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
"""Of a function that says nothing of its arguments."""


def grammar_of_calls(
    functions: Sequence[Function],
    key: str,
    *,
    begin: str,
    end: str,
    each: tuple[str, str] = ("", ""),
    between: str,
    most: int,
) -> str:
    """From one to `most` objects {"name": ..., key: arguments}.

    begin, end: what is around all of them, as elements of a Lark rule; each: texts around each;
    between: text.
    """
    more = f"({json.dumps(between)} call){{0,{most - 1}}}" if most > 1 else ""
    lines = [
        f"start: {begin} call {more} {end}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        head = f'{each[0]}{{"name": {json.dumps(function.name)}, "{key}": '
        schema = json.dumps(
            schema_with_options(function.parameters or ANY_ARGUMENTS, "tools"), ensure_ascii=False
        )
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + each[1])}")
        lines.append(f"arguments_{i}: %json {schema}")
    return "\n".join(lines)
