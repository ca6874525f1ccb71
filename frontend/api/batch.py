"""The prompts of a call of LLM, run together, with a bar that shows how many are done."""

from __future__ import annotations

import asyncio
import numbers
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import tqdm

from sidestep.frontend.input.prompts import Prompt
from sidestep.ipc.common.errors import ValidationError

T = TypeVar("T")
Conversation = Sequence[Mapping[str, Any]]
Bar = bool | Callable[..., Any]
"""Whether to show a bar, or a function that makes one, as tqdm.tqdm does."""
_OF_A_PROMPT = ("prompt", "prompt_token_ids", "messages")
"""Fields of one prompt.

In an error of a call with several prompts, the prompt's index is added.
"""


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, one for each prompt.

    The first failure ends the other requests and is raised. With several prompts, the error names
    the index of the prompt.
    """
    tasks = list[asyncio.Task[T]]()
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        error = several.exceptions[0]
        if isinstance(error, ValidationError) and error.field in _OF_A_PROMPT and len(tasks) > 1:
            index = next(
                i
                for i, task in enumerate(tasks)
                if not task.cancelled() and task.exception() is error
            )
            raise error.in_list("prompts", index) from None
        raise error from None
    return [task.result() for task in tasks]


def as_list_of_conversations(messages: Conversation | Iterable[Conversation]) -> list[Conversation]:
    """Return one conversation or several as a list."""
    given: object = messages
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ValidationError("messages", f"must be a list of messages, not {type(given).__name__}")
    several = list(given)
    if not several:
        raise ValidationError("messages", "is empty")
    conversations = [several] if isinstance(several[0], Mapping) else several
    for one in conversations:
        if not isinstance(one, Sequence) or not one or not isinstance(one[0], Mapping):
            raise ValidationError("messages", f"holds {one!r}, which is not a list of messages")
    return cast(list[Conversation], conversations)


def as_list_of_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list.

    A list of numbers or of messages is one prompt.
    """
    given: object = prompts
    if isinstance(given, str | Mapping):
        return [cast(Prompt, given)]
    if not isinstance(given, Iterable):
        raise ValidationError(
            "prompts", f"must be prompts or a single one, not {type(given).__name__}"
        )
    several = list(given)
    if several and isinstance(several[0], numbers.Integral):
        return [several]
    if several and isinstance(several[0], Mapping) and "role" in several[0]:
        return [several]
    return several


class Progress:
    """A bar of finished requests, with tokens a second in and out."""

    def __init__(self, total: int, bar: Bar) -> None:
        make = bar if callable(bar) else tqdm.tqdm
        self._bar = make(total=total, disable=not bar, desc="Processed prompts", dynamic_ncols=True)
        self._tokens_in = self._tokens_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def add(self, num_in: int, num_out: int) -> None:
        """Count a request that has ended, with the numbers of its prompt's and output's tokens."""
        self._tokens_in += num_in
        self._tokens_out += num_out
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        rates = (
            f"in {self._tokens_in / elapsed:.0f} tok/s, out {self._tokens_out / elapsed:.0f} tok/s"
        )
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update()
