"""A model's config.json for the readers of model families, with a checked type for each field.

A field of another type is refused in one sentence that names it, so that no reader computes with
it. The user's values (hf_overrides) are merged in first, and checked like the file's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError, ValidationError

_ROPE_NAMES = ("rope_scaling", "rope_parameters")
"""Older and newer name of the same object."""
_ROPE_COMMON = ("rope_theta", "partial_rotary_factor")
"""Fields of a rotary embedding that stay when an override gives it another type."""


class HfConfig:
    """The fields of one config.json, with the user's overrides. Null counts as a missing field."""

    def __init__(
        self,
        path: str,
        values: Mapping[str, Any],
        overrides: Mapping[str, Any] | None = None,
        file: str = "config.json",
    ) -> None:
        """Merge the overrides into the file's values.

        path: the model's folder, or its file. file: the source of the values, for messages.
        """
        self.path = path
        self.overridden = frozenset(_of_text(overrides or {}))
        """Fields that the user has set, top-level ones or those of the language model."""
        self._in_file = frozenset(_of_text(values))
        self._values = _merged(_of_text(values), _of_text(overrides or {}))
        self._asked = set(_ROPE_NAMES)
        self._file = file
        self._source = f"{file} with hf_overrides" if overrides else file

    def __repr__(self) -> str:
        return f"HfConfig({self.path!r}, {len(self._values)} fields)"

    @property
    def architecture(self) -> str:
        """The first of the model's architectures that can be loaded.

        Raises EngineStartError if none can.
        """
        names = self.names("architectures")
        for name in names:
            if registry.model_class(name) is not None:
                return name
        own = (
            ", and its own code (auto_map) is never run here" if "auto_map" in self._values else ""
        )
        raise EngineStartError(
            f"model: architecture {', '.join(names) or 'none'} is not "
            f"supported{own}; supported are {', '.join(registry.model_names())}"
        )

    def get(self, name: str) -> Any:
        """Return the field unchecked; None if it is missing."""
        self._asked.add(name)
        return self._values.get(name)

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Count these values for missing fields, in a family whose files leave defaults out."""
        given = {name: value for name, value in self._values.items() if value is not None}
        self._values = {**defaults, **given}

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number.

        Raises EngineStartError, also for a missing field without a default.
        """
        value = self._given(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, f"must be a whole number of at least {least}, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number. Raises EngineStartError for anything else, as the methods below do."""
        value = self._given(name, default)
        if not is_number(value):
            self.refuse(name, f"must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            self.refuse(name, f"must be true or false, not {value!r}")
        return value

    def names(self, name: str) -> list[str]:
        """Return a list of strings; an empty one if it is missing."""
        value = self._given(name, [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(name, f"must be a list of strings, not {value!r}")
        return list(value)

    def part(self, name: str) -> dict[str, Any]:
        """Return an object; an empty one if it is missing."""
        value = self._given(name, {})
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, not {value!r}")
        return dict(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one token id or several; none if the field is missing."""
        return token_ids(self.get(name), f"{name} in {self._source}")

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise EngineStartError for one field."""
        raise EngineStartError(f"model: {name} in {self._source} {problem}")

    def check_overrides(self) -> None:
        """Raise ValidationError for an override that no reader has read.

        Call it after the reader.
        """
        for name in sorted(self.overridden - self._in_file - self._asked):
            raise ValidationError(
                "hf_overrides",
                f"{name!r} is neither a field of this model's "
                "config.json nor one that the engine reads",
            )

    def _given(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise EngineStartError(f"model: {self._file} in {self.path} lacks {name!r}")
        return value


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if there is no file. Raises EngineStartError."""
    if not file.exists():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineStartError(f"model: {file} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise EngineStartError(f"model: {file} does not hold a JSON object")
    return value


def is_number(value: object) -> bool:
    """Return whether the value is a finite number. A bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def token_ids(value: object, name: str) -> tuple[int, ...]:
    """Return the ids of one token id, a list of them, or null. Raises EngineStartError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for one in ids:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise EngineStartError(
                f"model: {name} must be a token id or a list of them, not {value!r}"
            )
    return tuple(ids)


def _of_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the language model, which some files have apart, in text_config.

    They count before the fields around them.
    """
    text = values.get("text_config")
    if not isinstance(text, dict):
        return dict(values)
    outer = {name: value for name, value in values.items() if name != "text_config"}
    own = {name: value for name, value in text.items() if name != "architectures"}
    return outer | own


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's values with the user's over them, objects merged field by field.

    Two fields have an older name too. In the result the rotary embedding's object has the newer
    name. For dtype and torch_dtype, the name that the user gives counts.
    """
    rope, new = _rope_object(values), _rope_object(overrides)
    if "rope_theta" in overrides:
        rope.pop("rope_theta", None)
    old_type, new_type = _rope_type(rope), _rope_type(new)
    if (new_type is not None and new_type != old_type) or any(
        name in overrides and not overrides[name] for name in _ROPE_NAMES
    ):
        rope = {name: rope[name] for name in _ROPE_COMMON if name in rope}
    if new_type is not None:  # under either name in the file
        rope = {name: value for name, value in rope.items() if name not in ("type", "rope_type")}
    hidden = (*_ROPE_NAMES, *(("dtype",) if "torch_dtype" in overrides else ()))
    merged = _deep(
        {n: v for n, v in values.items() if n not in hidden},
        {n: v for n, v in overrides.items() if n not in _ROPE_NAMES},
    )
    return {**merged, "rope_parameters": _deep(rope, new)}


def _rope_object(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object that transformers uses if both names are there."""
    for name in _ROPE_NAMES:
        if value := values.get(name):
            if not isinstance(value, dict):
                raise EngineStartError(
                    f"model: {name} in config.json must be an object, not {value!r}"
                )
            return dict(value)
    return {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type")


def _deep(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in overrides.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _deep(old, value)
        merged[name] = value
    return merged
