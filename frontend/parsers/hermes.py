"""The parser of calls as Hermes models, Qwen2.5 and Qwen3 write them.

Each call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Calls follow one another,
with or without text before them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sidestep.frontend.parsers.call_grammars import ANY_ARGUMENTS, grammar_of_calls
from sidestep.frontend.parsers.events import Content, Event, Function, partial_length
from sidestep.frontend.parsers.json_calls import CallScanner

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser:
    """The parser of the calls in one answer."""

    special_tokens: ClassVar[bool] = False

    def __init__(self) -> None:
        self._held = ""
        """Text whose meaning is not decided yet."""
        self._call: CallScanner | None = None
        self._skips = False
        """Whether the text is between a call's object and its closing mark."""
        self._has_calls = False

    @staticmethod
    def new_call_id() -> str:
        """Return an id as OpenAI's API makes them."""
        return f"call_{uuid.uuid4().hex[:24]}"

    @staticmethod
    def grammar(functions: Sequence[Function], most: int, literal: Callable[[str], str]) -> str:
        """Return a grammar of calls alone."""
        return grammar_of_calls(
            functions,
            "arguments",
            begin="",
            end="",
            each=(_OPEN + "\n", "\n" + _CLOSE),
            between="\n",
            most=most,
        )

    @staticmethod
    def structural_tag(functions: Sequence[Function]) -> dict[str, Any]:
        """Return a structural tag of calls in text."""
        return {
            "type": "structural_tag",
            "triggers": [_OPEN],
            "structures": [
                {
                    "begin": f'{_OPEN}\n{{"name": {json.dumps(function.name)}, "arguments": ',
                    "schema": function.parameters or ANY_ARGUMENTS,
                    "end": "}\n" + _CLOSE,
                }
                for function in functions
            ],
        }

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        self._held += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Return the text that was held back: a call that has not begun was text after all."""
        rest = self._held
        if self._call is not None:
            rest = "" if self._call.begun else _OPEN + self._call.raw
        elif self._skips or (self._has_calls and not rest.strip()):
            rest = ""
        self._held, self._call = "", None
        return [Content(rest)] if rest else []

    def _step(self, events: list[Event]) -> bool:
        """Read one element of the text; return False when more text is needed."""
        if self._call is not None:
            return self._read_call(self._call, events)
        if self._skips:
            return self._skip_to_close()
        at = self._held.find(_OPEN)
        if at < 0:
            # White space before a call does not belong to the answer, so it waits for the text that
            # follows.
            known = self._held[: len(self._held) - partial_length(self._held, _OPEN)].rstrip()
            self._tell(known, events)
            self._held = self._held[len(known) :]
            return False
        self._tell(self._held[:at].rstrip(), events)
        self._held, self._call = self._held[at + len(_OPEN) :], CallScanner()
        return True

    def _read_call(self, call: CallScanner, events: list[Event]) -> bool:
        end = call.feed(self._held, 0, events)
        self._held = self._held[end:]
        self._has_calls |= call.begun
        if call.broken:
            self._call, self._skips = None, call.begun
            self._tell("" if call.begun else _OPEN + call.raw, events)
        elif call.done:
            self._call, self._skips = None, True
        return call.broken or call.done

    def _skip_to_close(self) -> bool:
        at = self._held.find(_CLOSE)
        if at < 0:
            self._held = self._held[len(self._held) - partial_length(self._held, _CLOSE) :]
            return False
        self._held, self._skips = self._held[at + len(_CLOSE) :], False
        return True

    def _tell(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))
