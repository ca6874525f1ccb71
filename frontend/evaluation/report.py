"""The report of an evaluation: a table for people, or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from sidestep.frontend.evaluation.thresholds import Failure
from sidestep.frontend.evaluation.units import Figures

_NONE = ""
_MOST_NAMED = 10
"""Wrong tasks that the table names; the JSON object has all."""


class Report(msgspec.Struct, frozen=True):
    """All that an evaluation has found."""

    model: str
    against: str | None
    devices: dict[str, str]
    """Device, threads and dtype of 'model' and 'against'."""
    options: dict[str, Any]
    """Options that the figures depend on, as the state file has them."""
    figures: dict[str, Figures]
    """Figures by suite of 'model' and 'against', and those of the 'comparison'."""
    failed: list[Failure]

    def to_json(self) -> str:
        """Return the report as a JSON object. A figure that is no finite number is null."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def lines(self) -> list[str]:
        """Return the report as a table, with a column for each model."""
        rows = [("", "model", "against" if self.against is not None else _NONE)]
        ours = dict(_flat(self.figures["model"]))
        others = dict(_flat(self.figures.get("against", {})))
        rows += [(name, ours[name], others.get(name, _NONE)) for name in ours]
        comparison = self.figures.get("comparison", {})
        rows += [(name, _shown(value), _NONE) for name, value in comparison.items()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return [
            *(
                f"{role}: {name}, {self.devices[role]}"
                for role, name in (("model", self.model), ("against", self.against))
                if name is not None
            ),
            *(
                "  ".join((row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]))).rstrip()
                for row in rows
            ),
            *_wrong(self.figures["model"]),
        ]


def _flat(figures: Figures) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of one model's figures."""
    for suite, values in figures.items():
        for name, value in values.items():
            if name == "by_length":
                for length, one in value.items():
                    yield f"{suite} recall, {length} tokens", _shown(one["recall"])
            elif not isinstance(value, list):
                yield name if name.startswith(suite) else f"{suite} {name}", _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _wrong(figures: Figures) -> Iterator[str]:
    """Yield a line with the first tasks whose answers are wrong, if there are any."""
    wrong = figures.get("tasks", {}).get("wrong", [])
    if wrong:
        more = f" and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        yield f"wrong tasks: {', '.join(wrong[:_MOST_NAMED])}{more}"
