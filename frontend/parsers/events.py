"""The events that parsers find in a model's text, and the interfaces of the parsers.

However a text was cut into pieces, its events are the same once they are joined.
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
    """Text of the reasoning that leads to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call of a function; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the arguments' JSON, of the call that has begun last."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] | None
    """JSON schema of its arguments."""


class Parser(Protocol):
    """The interface of a parser, which reads a text as it comes."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        ...

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, since nothing follows."""
        ...


class ToolParser(Parser, Protocol):
    """The interface of a parser that finds the calls in one answer.

    Its class is named in ipc.common.registry.TOOL_PARSERS.
    """

    special_tokens: ClassVar[bool]
    """Whether its marks are special tokens, which are left out of a text by default."""

    @staticmethod
    def new_call_id() -> str:
        """Return a call's id, in the form that the model's template takes."""
        ...

    @staticmethod
    def grammar(functions: Sequence[Function], most: int, literal: Callable[[str], str]) -> str:
        """Return a grammar, in Lark's form, of one to `most` calls of these functions alone.

        literal: returns a text in the grammar's form, or the special token that has this text.
        """
        ...

    @staticmethod
    def structural_tag(functions: Sequence[Function]) -> dict[str, Any] | None:
        """Return text with calls of these functions, as StructuredOutputsParams.structural_tag.

        None if the beginning of a call could be text.
        """
        ...


class ReasoningParser(Parser, Protocol):
    """The interface of a parser that separates the reasoning from one answer.

    It is made with the end of the prompt. Its class is named in
    ipc.common.registry.REASONING_PARSERS.
    """

    marks: tuple[str | None, str] | None
    """The mark that may begin the reasoning, and the mark that ends it.

    The first is None if the prompt has begun the reasoning. The whole is None for an answer that
    has no reasoning.
    """


class AnswerParser:
    """A parser for reasoning and calls: it looks for calls in the text that is not reasoning."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        most_calls: int | None = None,
    ) -> None:
        """Combine two parsers, either of which may be missing.

        most_calls: calls of an answer that are kept; further calls are dropped.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._most_calls = most_calls
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        return self._find_calls(
            [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        )

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, since nothing follows."""
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
    """Return the number of characters at the end of `text` that could begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
