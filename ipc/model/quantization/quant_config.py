"""The fields in which a file states a quantization, each with a checked type."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from sidestep.ipc.common.errors import EngineStartError


class QuantConfig:
    """The fields of one object. Null counts as a missing field."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        """Read the fields. source: the object's place, for messages."""
        self.source = source
        self._values = {name: value for name, value in values.items() if value is not None}

    @property
    def method(self) -> str:
        """The method's name, as the registry has it."""
        name = str(self._values.get("quant_method", "unknown")).lower()
        return _SAME.get(name, name)

    def get(self, *names: str) -> Any:
        """Return the first of these fields that is there; None if none is."""
        return next((self._values[name] for name in names if name in self._values), None)

    def whole(self, *names: str, default: int | None = None) -> int:
        """Return a whole number, under the first of these names that is there."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(names[0], f"must be a whole number, not {value!r}")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self.get(*names)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(names[0], f"must be true or false, not {value!r}")
        return value

    def names(self, *names: str) -> list[str]:
        """Return a list of strings; an empty one if it is missing."""
        value = self.get(*names)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            self.refuse(names[0], f"must be a list of strings, not {value!r}")
        return list(value)

    def part(self, name: str) -> QuantConfig:
        """Return an object; an empty one if it is missing."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, f"must be an object, not {value!r}")
        return QuantConfig(f"{name} in {self.source}", value)

    def items(self) -> list[tuple[str, Any]]:
        """Return the fields with their values."""
        return list(self._values.items())

    def parts(self) -> list[QuantConfig]:
        """Return the objects of all fields."""
        return [self.part(name) for name in self._values]

    def choice(self, name: str, choices: Collection[Any], default: Any = None) -> Any:
        """Return the field, which must be one of these."""
        value = self._values.get(name, default)
        if value not in choices:
            said = ", ".join(repr(one) for one in choices)
            self.refuse(name, f"is {value!r}, which is not supported; supported are {said}")
        return value

    def refuse(self, name: str, problem: str) -> NoReturn:
        """Raise EngineStartError for one field."""
        raise EngineStartError(f"model: {name} in {self.source} {problem}")


_SAME = {"auto-round": "auto-round", "modelopt_fp8": "modelopt", "fbgemm-fp8": "fbgemm_fp8"}
"""Other names of methods."""
