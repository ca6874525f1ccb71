"""The parser of calls as Mistral models write them after `[TOOL_CALLS]`.

The calls are a list of objects with name and arguments. In newer models they are `name[ARGS]{...}`,
each call with its own mark.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import ClassVar

from sidestep.frontend.parsers.call_grammars import grammar_of_calls
from sidestep.frontend.parsers.events import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Function,
    partial_length,
)
from sidestep.frontend.parsers.json_calls import CallScanner, ValueScanner

_MARK = "[TOOL_CALLS]"
_SPACE = " \t\r\n"
_NAME = re.compile(r"\s*(?P<name>[a-zA-Z0-9_.-]+)\s*(\[CALL_ID\]\w*)?(\[ARGS\])?\s*(?={)")
_NAME_SO_FAR = re.compile(r"\s*[a-zA-Z0-9_.-]*\s*(\[[A-Z_]*\]?\w*)?(\[[A-Z]*\]?)?\s*")
_ID = string.ascii_letters + string.digits


class MistralToolParser:
    """The parser of the calls in one answer."""

    special_tokens: ClassVar[bool] = True

    def __init__(self) -> None:
        self._held = ""
        self._is_marked = False
        """Whether the text follows the mark, after which a list or a name begins."""
        self._in_list = False
        self._call: CallScanner | None = None
        self._arguments: ValueScanner | None = None
        self._has_calls = False

    @staticmethod
    def new_call_id() -> str:
        """Return nine letters and digits: the templates refuse other ids."""
        return "".join(secrets.choice(_ID) for _ in range(9))

    @staticmethod
    def grammar(functions: Sequence[Function], most: int, literal: Callable[[str], str]) -> str:
        """Return a grammar of calls alone, as a list, which all models of the family read."""
        return grammar_of_calls(
            functions,
            "arguments",
            begin=f'{literal(_MARK)} "["',
            end='"]"',
            between=", ",
            most=most,
        )

    @staticmethod
    def structural_tag(functions: Sequence[Function]) -> None:
        """Return None: the mark is a special token, which a structural tag cannot name."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that the new text decides."""
        self._held += text
        events: list[Event] = []
        while self._held and self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """Return the text that was held back: a call that has not begun was text after all."""
        rest = self._held
        if self._call is not None:
            rest = "" if self._call.begun else self._call.raw + rest
        elif self._arguments is not None or self._in_list:
            rest = ""
        elif self._is_marked:
            rest = _MARK + rest
        elif self._has_calls and not rest.strip():
            rest = ""
        self._held, self._call, self._arguments, self._in_list, self._is_marked = (
            "",
            None,
            None,
            False,
            False,
        )
        return [Content(rest)] if rest else []

    def _step(self, events: list[Event]) -> bool:
        """Read one element of the text; return False when more text is needed."""
        if self._call is not None:
            return self._read_object(self._call, events)
        if self._arguments is not None:
            return self._read_arguments(self._arguments, events)
        if self._in_list:
            return self._read_list()
        if self._is_marked:
            return self._read_name_or_list(events)
        return self._find_mark(events)

    def _find_mark(self, events: list[Event]) -> bool:
        at = self._held.find(_MARK)
        if at < 0:
            known = self._held[: len(self._held) - partial_length(self._held, _MARK)].rstrip()
            self._tell(known, events)
            self._held = self._held[len(known) :]
            return False
        self._tell(self._held[:at].rstrip(), events)
        self._held, self._is_marked = self._held[at + len(_MARK) :], True
        return True

    def _read_name_or_list(self, events: list[Event]) -> bool:
        text = self._held.lstrip(_SPACE)
        if text.startswith("["):
            self._held, self._is_marked, self._in_list = text[1:], False, True
            return True
        if (name := _NAME.match(text)) is not None:
            events.append(CallBegin(name["name"]))
            self._held, self._is_marked = text[name.end() :], False
            self._arguments, self._has_calls = ValueScanner(), True
            return True
        if _NAME_SO_FAR.fullmatch(text):
            return False
        self._tell(_MARK, events)
        self._is_marked = False
        return True

    def _read_list(self) -> bool:
        text = self._held.lstrip(_SPACE + ",")
        if text.startswith("{"):
            self._held, self._call = text, CallScanner()
            return True
        self._held = text
        if text:
            self._in_list = False
            self._held = text.removeprefix("]")
        return bool(text)

    def _read_object(self, call: CallScanner, events: list[Event]) -> bool:
        end = call.feed(self._held, 0, events)
        self._held = self._held[end:]
        self._has_calls |= call.begun
        if call.broken:
            self._tell("" if call.begun else call.raw, events)
            self._call, self._in_list = None, False
        elif call.done:
            self._call = None
        return call.broken or call.done

    def _read_arguments(self, arguments: ValueScanner, events: list[Event]) -> bool:
        end = arguments.feed(self._held, 0)
        if end:
            events.append(CallArguments(self._held[:end]))
        self._held = self._held[end:]
        if arguments.done:
            self._arguments = None
        return arguments.done

    def _tell(self, text: str, events: list[Event]) -> None:
        if text:
            events.append(Content(text))
