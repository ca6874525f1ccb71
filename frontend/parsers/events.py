"""What parsers of a model's text find in it. Joined, the events of a text are the same however the
text was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that leads to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments' JSON, of the call that has begun last."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called."""

    name: str
    parameters: dict[str, Any] | None
    """JSON schema of its arguments."""


class Parser(Protocol):
    """Reads a text as it comes."""

    def feed(self, text: str) -> list[Event]:
        """What the new text settles."""
        ...

    def finish(self) -> list[Event]:
        """What was held back: nothing follows."""
        ...


class ToolParser(Parser, Protocol):
    """Finds the calls in an answer. One for each answer; its class is named in
    ipc.registry.TOOL_PARSERS.
    """

    special_tokens: ClassVar[bool]
    """Whether its marks are special tokens, which a text lacks otherwise."""

    @staticmethod
    def new_call_id() -> str:
        """A call's id, in the form that the model's template wants it back."""
        ...

    @staticmethod
    def grammar(functions: Sequence[Function], most: int, literal: Callable[[str], str]) -> str:
        """From one to `most` calls of these functions and nothing else, in Lark's form. literal: a
        text there, or the special token that has this text.
        """
        ...

    @staticmethod
    def structural_tag(functions: Sequence[Function]) -> dict[str, Any] | None:
        """Text with calls of these functions in it, as StructuredOutputsParams.structural_tag; None
        where a call's beginning could be text.
        """
        ...


class ReasoningParser(Parser, Protocol):
    """Tells the reasoning from the answer. One for each answer, made with the prompt's end; its
    class is named in ipc.registry.REASONING_PARSERS.
    """

    marks: tuple[str | None, str] | None
    """What may begin the reasoning (None: the prompt has done so), and what ends it; None for an
    answer that has no reasoning."""


class AnswerParser:
    """Both: tools are looked for in what is not reasoning."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        most_calls: int | None = None,
    ) -> None:
        """most_calls: calls of an answer that are kept; further calls are dropped."""
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = most_calls
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """What the new text settles."""
        return self._find_calls(
            [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        )

    def finish(self) -> list[Event]:
        """What was held back: nothing follows."""
        events = self._find_calls([] if self._reasoning is None else self._reasoning.finish())
        return events if self._tools is None else events + self._limited(self._tools.finish())

    def _find_calls(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        found: list[Event] = []
        for event in events:
            found += (
                self._limited(self._tools.feed(event.text))
                if isinstance(event, Content)
                else [event]
            )
        return found

    def _limited(self, events: list[Event]) -> list[Event]:
        """Return the events without those of calls beyond the limit."""
        if self._most_calls is None:
            return events
        kept: list[Event] = []
        for event in events:
            self._num_calls += isinstance(event, CallBegin)
            if self._num_calls <= self._most_calls or not isinstance(
                event, CallBegin | CallArguments
            ):
                kept.append(event)
        return kept


def partial_length(text: str, mark: str) -> int:
    """Characters at the end of `text` that could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
