"""The limits that figures must keep to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sidestep.frontend.evaluation.units import Figures
from sidestep.frontend.options.eval_options import EvalArgs


class Failure(msgspec.Struct, frozen=True):
    """A figure that does not keep to its limit."""

    option: str
    figure: str
    value: float
    limit: float

    def __str__(self) -> str:
        side = "below" if self.option.startswith("min_") else "above"
        flag = f"--{self.option.replace('_', '-')}"
        return f"{self.figure} is {self.value:.6g}, {side} {flag} {self.limit:g}"


def _model(suite: str, figure: str) -> Callable[[Figures], dict[str, float]]:
    return lambda figures: {f"{suite} {figure}": figures["model"][suite][figure]}


def _comparison(figure: str) -> Callable[[Figures], dict[str, float]]:
    return lambda figures: {figure: figures["comparison"][figure]}


def _recalls(figures: Figures) -> dict[str, float]:
    by_length = figures["model"]["needle"]["by_length"]
    return {f"needle recall at {length}": one["recall"] for length, one in by_length.items()}


LIMITS: dict[str, Callable[[Figures], dict[str, float]]] = {
    "max_perplexity": lambda figures: {"perplexity": figures["model"]["perplexity"]["perplexity"]},
    "max_perplexity_increase": _comparison("perplexity_increase"),
    "max_kl": _comparison("kl_divergence"),
    "min_top1": _comparison("top1_agreement"),
    "min_needle": _recalls,
    "min_json": _model("json", "valid"),
    "min_json_free": _model("json", "valid_free"),
    "min_exact": _model("tasks", "right"),
}
"""The figures that each option limits, by their names in messages."""


def failures(args: EvalArgs, figures: dict[str, Any]) -> list[Failure]:
    """Return the figures of an evaluation that do not keep to the limits in `args`.

    A figure that is no number, because the model gave none, keeps to no limit.
    """
    found = []
    for option, of_figures in LIMITS.items():
        limit = getattr(args, option)
        if limit is None:
            continue
        for name, value in of_figures(figures).items():
            keeps = value >= limit if option.startswith("min_") else value <= limit
            if not keeps:
                found.append(Failure(option, name, value, limit))
    return found
