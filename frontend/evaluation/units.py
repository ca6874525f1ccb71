"""Units: the prompts of an evaluation, each with the result that its output gives.

A suite makes units for a model, and figures from their results. Results are what JSON can hold, so
those of an earlier run, which a state file keeps, give the same figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind, SamplingParams

Result = dict[str, Any]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """A prompt that is measured as a whole."""

    name: str
    """Name within its suite."""
    prompt: list[int]
    params: SamplingParams
    score: Callable[[RequestOutput], Result]


class Suite(Protocol):
    """A kind of measurement."""

    @property
    def name(self) -> str:
        """Name in reports and state files."""

    def units(self, subject: Subject) -> list[Unit]:
        """Return the prompts for a model. Raises ValidationError, which names the option."""

    def figures(self, results: Mapping[str, Result]) -> Figures:
        """Return the figures from the results of all units, by their names."""


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Return the parameters of a greedy answer."""
    return SamplingParams(
        temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY, **more
    )


def check_length(unit: Unit, option: str, max_model_len: int) -> None:
    """Raise ValidationError, which names the suite's option, for a unit that does not fit."""
    tokens = len(unit.prompt) + (unit.params.max_tokens or 1)
    if tokens > max_model_len:
        raise ValidationError(
            option,
            f"{unit.name} has {len(unit.prompt)} tokens and needs {unit.params.max_tokens} for "
            f"its output, more than max_model_len ({max_model_len})",
        )
