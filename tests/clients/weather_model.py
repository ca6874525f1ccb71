"""Text of a model that calls the first tool in its prompt, and then uses the tool's output."""

from __future__ import annotations

import json
import re
from typing import Any

_TOOL = re.compile(r'<tool>(\{"type": "function".*?\})</tool>')
_OUTPUT = re.compile(r"<tool>(?!\{\"type\": \"function\")")
_KNOWN = {"city": "Bern", "location": "Bern", "a": 2, "b": 3}


def answer(prompt: str) -> str:
    """Return the model's answer to a prompt that the template of tests/server/conftest.py made."""
    tool = _TOOL.search(prompt)
    turn = prompt[prompt.rfind("<user>") :]
    if tool is None or _OUTPUT.search(turn):
        return "It is 21 degrees in Bern."
    function = json.loads(tool[1])["function"]
    if function["name"] == "call_twice":
        return "\n".join(_call("call_twice", {"number": number}) for number in (1, 2))
    return _call(function["name"], _arguments(function["parameters"]))


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return values for the properties of a schema."""
    return {
        name: _KNOWN[name] if name in _KNOWN else _value(each)
        for name, each in schema.get("properties", {}).items()
    }


def _value(schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    return {"integer": 1, "number": 1.5, "boolean": True, "array": []}.get(
        schema.get("type", ""), "sunny"
    )
