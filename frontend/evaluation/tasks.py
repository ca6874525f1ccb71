"""Tasks with known answers, from a file of JSON lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Literal

from sidestep.frontend.evaluation.lines import PromptRow, of_line, read_rows
from sidestep.frontend.evaluation.subject import Subject
from sidestep.frontend.evaluation.units import Figures, Result, Unit, greedy
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.output.outputs import RequestOutput


class Task(PromptRow, kw_only=True, forbid_unknown_fields=True):
    """A line of the file."""

    answer: str | list[str]
    """The right answer, or several of which one is enough."""
    match: Literal["exact", "contains", "regex"] = "exact"
    """How the output is compared.

    'exact': it equals the answer, but for white space at both ends. 'contains': the answer is a
    part of it. 'regex': the answer is a regular expression that is found in it.
    """
    max_tokens: int | None = None
    stop: str | list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.answers:
            raise ValueError("answer is empty")
        if self.match == "regex":
            for pattern in self.answers:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"answer {pattern!r} is no regex: {error}") from None

    @property
    def answers(self) -> list[str]:
        """The right answers."""
        return [self.answer] if isinstance(self.answer, str) else self.answer

    def accepts(self, output: str) -> bool:
        """Return whether an output is right."""
        if self.match == "exact":
            return output.strip() in [answer.strip() for answer in self.answers]
        if self.match == "contains":
            return any(answer in output for answer in self.answers)
        return any(re.search(answer, output) for answer in self.answers)


class Tasks:
    """The suite of a file of tasks."""

    name = "tasks"

    def __init__(self, args: EvalArgs) -> None:
        """Read the file; raises ValidationError, OSError."""
        self._path = args.tasks or ""
        self._max_tokens = args.max_tokens
        self._tasks, self.digest = read_rows("tasks", self._path, Task)

    def units(self, subject: Subject) -> list[Unit]:
        """Return the tasks as prompts."""
        return [
            of_line("tasks", self._path, name, partial(self._unit, name, task, subject))
            for name, task in self._tasks.items()
        ]

    def _unit(self, name: str, task: Task, subject: Subject) -> Unit:
        most = self._max_tokens if task.max_tokens is None else task.max_tokens

        def score(output: RequestOutput) -> Result:
            text = output.outputs[0].text
            return {"right": task.accepts(text), "output": text}

        return Unit(name, task.ids(subject), greedy(most, stop=task.stop), score)

    def figures(self, results: Mapping[str, Result]) -> Figures:
        """Return the share of right answers, and the tasks whose answers are wrong."""
        wrong = [name for name in self._tasks if not results[name]["right"]]
        return {
            "right": 1 - len(wrong) / len(results),
            "tasks": len(results),
            "wrong": wrong,
        }
