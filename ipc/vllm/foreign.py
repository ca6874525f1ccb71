"""One entry of the tables of vLLM's names in this folder, and its use.

Scripts for vLLM run with only the import changed if the option, argument or method means the same
here. A name without a meaning here raises one error that names it and says what to do. The tables
are used by Python, the command line and the documentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sidestep.ipc.common.errors import ValidationError

NO_LORA = (
    "LoRA adapters are not served yet; merge the adapter into the model's weights and load the "
    "result"
)
NO_IMAGES = "only text goes into a model here; leave it out"

Form = Literal["value", "switch", "list"]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A name that vLLM has. None is always accepted as its value: it asks for nothing."""

    instead: str
    """The end of a sentence that begins with the name.

    It says what sidestep does, and what the user can do.
    """
    accepted: tuple[Any, ...] = ()
    """Values that ask for what sidestep does anyway."""
    same_as: str | None = None
    """The name of the same meaning here; it gets the value."""
    form: Form = "value"
    """Form on the command line: a value, a switch (`--x` and `--no-x`), or several values."""

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether the value asks for what sidestep does anyway."""
        return value is None or any(
            type(value) is type(one) and value == one for one in self.accepted
        )


def translate(given: Mapping[str, Any], table: Mapping[str, Foreign]) -> dict[str, Any]:
    """Return the arguments with vLLM's names replaced by ours.

    Names that are not in the table stay as they are. Raises ValidationError for a name without a
    meaning here.
    """
    ours: dict[str, Any] = {}
    for name, value in given.items():
        foreign = table.get(name)
        if foreign is None:
            ours[name] = value
        elif foreign.same_as is not None:
            if foreign.same_as in given:
                raise ValidationError(
                    name, f"means the same as {foreign.same_as}; give one of them"
                )
            if value is not None:
                ours[foreign.same_as] = value
        elif not foreign.asks_for_nothing(value):
            raise ValidationError(name, foreign.instead)
    return ours
