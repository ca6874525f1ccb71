"""The grammars of calls that the tool parsers read, in Lark's form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sidestep.frontend.input.output_form import schema_with_options
from sidestep.frontend.parsers.events import Function

ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
"""The schema of a function that does not describe its arguments."""


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
    """Return a grammar of one to `most` objects {"name": ..., key: arguments}.

    begin, end: elements of a Lark rule around all calls. each: texts before and after each call.
    between: text between two calls.
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
