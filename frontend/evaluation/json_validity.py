"""The share of valid JSON among answers, with and without a response format."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from sidestep.frontend.evaluation.lines import PromptRow, of_line, read_rows
from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.evaluation.units import Figures, Result, Unit, greedy
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams

WITH, WITHOUT = "with", "without"
"""Whether a unit has the response format."""
_SHORT = {"type": "string", "maxLength": 40}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 9999}
_BUILT_IN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Anna is 31 years old and lives in Oslo.", {"name": _SHORT, "age": _COUNT, "city": _SHORT}),
    ("The train to Turin leaves at 9 from platform 4.", {"to": _SHORT, "platform": _COUNT}),
    ("A kilo of apples costs 3 euros, and pears are sold out.", {"fruit": _SHORT, "price": _COUNT}),
    ("The garden is open on Monday and on Friday.", {"open": {"type": "boolean"}, "place": _SHORT}),
    ("The book has 240 pages and was printed in 1998.", {"pages": _COUNT, "year": _COUNT}),
    ("It rains in Riga, and the wind is strong.", {"city": _SHORT, "rain": {"type": "boolean"}}),
    ("The old bridge is 120 metres long.", {"kind": _SHORT, "metres": _COUNT}),
    ("Two cups of flour, one egg and no sugar.", {"cups": _COUNT, "eggs": _COUNT}),
)
"""Texts, each with the properties of an object that describes it."""


class JsonPrompt(PromptRow, kw_only=True, forbid_unknown_fields=True):
    """A line of a file of prompts."""

    schema: dict[str, Any] | None = None
    """JSON schema of the response format; without it the format is any JSON object."""


class JsonValidity:
    """The suite of prompts for JSON."""

    name = "json"

    def __init__(self, args: EvalArgs) -> None:
        """Read the file, if there is one; raises ValidationError, OSError."""
        self._path = args.json_prompts
        self._max_tokens = args.max_tokens
        self.digest: str | None = None
        self._given: dict[str, JsonPrompt] | None = None
        if self._path is not None:
            self._given, self.digest = read_rows("json_prompts", self._path, JsonPrompt)

    def units(self, subject: Subject) -> list[Unit]:
        """Return each prompt twice: with and without the response format."""
        if self._given is None:
            rows = {f"prompt {n}": _built_in(*one, subject) for n, one in enumerate(_BUILT_IN, 1)}
        else:
            rows = self._given
        return [
            of_line(
                "json_prompts",
                self._path or "built-in prompts",
                name,
                partial(self._unit, name, row, kind, subject),
            )
            for name, row in rows.items()
            for kind in (WITH, WITHOUT)
        ]

    def _unit(self, name: str, row: JsonPrompt, kind: str, subject: Subject) -> Unit:
        form = (
            StructuredOutputsParams(json_object=True)
            if row.schema is None
            else StructuredOutputsParams(json=row.schema)
        )
        params = greedy(self._max_tokens, structured_outputs=form if kind == WITH else None)
        return Unit(f"{name}, {kind} format", row.ids(subject), params, score)

    def figures(self, results: Mapping[str, Result]) -> Figures:
        """Return both shares of valid JSON."""
        return {
            "valid": _share(results, WITH),
            "valid_free": _share(results, WITHOUT),
            "prompts": len(results) // 2,
        }


def score(output: RequestOutput) -> Result:
    """Return whether the whole output is JSON."""
    text = output.outputs[0].text
    return {"valid": is_json(text), "output": text}


def is_json(text: str) -> bool:
    """Return whether a text is one JSON object or array, with nothing but white space around."""
    try:
        return isinstance(msgspec.json.decode(text), dict | list)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _share(results: Mapping[str, Result], kind: str) -> float:
    of_kind = [one for name, one in results.items() if name.endswith(f", {kind} format")]
    return sum(bool(one["valid"]) for one in of_kind) / len(of_kind)


def _built_in(text: str, properties: dict[str, Any], subject: Subject) -> JsonPrompt:
    """Return a built-in prompt in the form that the model gets."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    keys = " and ".join(f'"{name}" ({kind["type"]})' for name, kind in properties.items())
    request = f"{text}\nDescribe this as one JSON object with the keys {keys}, and nothing else."
    if subject.chats:
        return JsonPrompt(messages=[{"role": "user", "content": request}], schema=schema)
    return JsonPrompt(prompt=f"{request}\nJSON:\n", schema=schema)
