"""The parser of calls as Llama 3.1 and 3.2 write them.

The whole answer is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, perhaps
several objects with semicolons between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from sidestep.frontend.parsers.call_grammars import grammar_of_calls
from sidestep.frontend.parsers.events import Content, Event, Function
from sidestep.frontend.parsers.hermes import HermesToolParser
from sidestep.frontend.parsers.json_calls import CallScanner

_TAG = "<|python_tag|>"
_BETWEEN = " \t\r\n;,"


class Llama3JsonToolParser:
    """The parser of the calls in one answer."""

    special_tokens: ClassVar[bool] = True
    new_call_id = staticmethod(HermesToolParser.new_call_id)

    def __init__(self) -> None:
        self._held = ""
        self._call: CallScanner | None = None
        self._is_text = False
        """Whether the rest of the answer is text without calls."""

    @staticmethod
    def grammar(functions: Sequence[Function], most: int, literal: Callable[[str], str]) -> str:
        """Return a grammar of calls alone."""
        return grammar_of_calls(functions, "parameters", begin="", end="", between="; ", most=most)

    @staticmethod
    def structural_tag(functions: Sequence[Function]) -> None:
        """Return None: an answer may begin with a brace and be text."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        if self._is_text:
            return [Content(text)] if text else []
        self._held += text
        events: list[Event] = []
        while self._held and not self._is_text and self._step(events):
            pass
        if self._is_text and self._held:
            events.append(Content(self._held))
            self._held = ""
        return events

    def finish(self) -> list[Event]:
        """Return the text that was held back: a call that has not begun was text after all."""
        call, rest = self._call, self._held
        if call is not None:
            rest = "" if call.begun else call.raw + rest
        self._held, self._call = "", None
        return [Content(rest)] if rest.strip(_BETWEEN) else []

    def _step(self, events: list[Event]) -> bool:
        """Read one element of the text; return False when more text is needed."""
        if self._call is None:
            return self._find_object()
        end = self._call.feed(self._held, 0, events)
        self._held = self._held[end:]
        if self._call.broken:
            if not self._call.begun:
                self._held = self._call.raw + self._held
            self._is_text, self._call = True, None
        elif self._call.done:
            self._call = None
        else:
            return False
        return True

    def _find_object(self) -> bool:
        text = self._held.lstrip(_BETWEEN)
        if text.startswith("{"):
            self._held, self._call = text, CallScanner()
            return True
        if text.startswith(_TAG):
            self._held = text[len(_TAG) :]
            return True
        if text and not _TAG.startswith(text):
            self._is_text = True
        return False
