"""Scanners of calls written as JSON, which read the text as it comes.

The arguments are passed on before their end has come.
"""

from __future__ import annotations

import enum

import msgspec

from sidestep.frontend.parsers.events import CallArguments, CallBegin, Event

_SPACE = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("name", "type", "id")


class ValueScanner:
    """A scanner that finds the end of one JSON value.

    It counts brackets; it does not check the text between them.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self._kind = ""
        """The value's first character."""
        self.done = False

    def feed(self, text: str, start: int) -> int:
        """Return the index in `text` after the value's last character that has come."""
        for i in range(start, len(text)):
            character = text[i]
            if not self._kind:
                self._kind = character
            if self._in_string:
                self._feed_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]" and self._depth:
                self._depth -= 1
            elif self._depth == 0 and character in ",}]" + _SPACE:
                self.done = True  # a number or a word, which ends before this
                return i
            if self._depth == 0 and not self._in_string and self._kind in '{["':
                self.done = True
                return i + 1
        return len(text)

    def _feed_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


class _At(enum.Enum):
    """The element that comes next in the object."""

    OPEN = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE_START = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()
    DONE = enum.auto()
    BROKEN = enum.auto()


class CallScanner:
    """A scanner of one object `{"name": ..., "arguments": {...}}`; some models say `parameters`.

    Until both name and arguments have come, `raw` keeps the text: an object of another kind is then
    no call.
    """

    def __init__(self) -> None:
        self.raw = ""
        """All text so far, until the call has begun."""
        self._at = _At.OPEN
        self._value: ValueScanner | None = None
        self._collected = ""
        """The part so far of the key or value that is being read."""
        self._key = ""
        self._name: str | None = None
        self._early = ""
        """Arguments that came before the name."""
        self.begun = False

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._at is _At.DONE

    @property
    def broken(self) -> bool:
        """Whether the object is not a call."""
        return self._at is _At.BROKEN

    def feed(self, text: str, start: int, events: list[Event]) -> int:
        """Read `text` from `start`, and return the index after the part that belongs to the object.

        Append the events to `events`.
        """
        i = start
        while i < len(text) and not self.done and not self.broken:
            before = i
            i = self._step(text, i, events)
            if not self.begun:
                self.raw += text[before:i]
        return i

    def _step(self, text: str, i: int, events: list[Event]) -> int:
        character = text[i]
        if self._value is not None:
            return self._read_value(text, i, events)
        if character in _SPACE:
            return i + 1
        if self._at is _At.VALUE_START:
            self._value, self._at = ValueScanner(), _At.VALUE
            return i
        if self._at is _At.KEY and character == '"':
            self._value, self._collected = ValueScanner(), ""
            return i
        follows = {
            (_At.OPEN, "{"): _At.KEY,
            (_At.COLON, ":"): _At.VALUE_START,
            (_At.COMMA, ","): _At.KEY,
            (_At.COMMA, "}"): _At.DONE,
        }
        self._at = follows.get((self._at, character), _At.BROKEN)
        if self._at is _At.DONE and not self.begun:
            self._at = _At.BROKEN
        return i + 1

    def _read_value(self, text: str, i: int, events: list[Event]) -> int:
        assert self._value is not None
        end = self._value.feed(text, i)
        piece, done = text[i:end], self._value.done
        if self._at is _At.VALUE and self._key in _ARGUMENT_KEYS:
            self._pass_arguments(piece, events)
        else:
            self._collected += piece
        if done:
            self._value = None
            if self._at is _At.KEY:
                self._key, self._collected = self._collected[1:-1], ""
                known = self._key in _ARGUMENT_KEYS or self._key in _OTHER_KEYS
                self._at = _At.COLON if known else _At.BROKEN
            else:
                self._at = _At.COMMA
                self._end_value(events)
        return end

    def _pass_arguments(self, piece: str, events: list[Event]) -> None:
        if self._name is None:
            self._early += piece
            return
        if not self.begun:
            self.begun, self.raw = True, ""
            events.append(CallBegin(self._name))
        if piece:
            events.append(CallArguments(piece))

    def _end_value(self, events: list[Event]) -> None:
        if self._key == "name" and not self.begun:
            try:
                self._name = msgspec.json.decode(self._collected, type=str)
            except msgspec.DecodeError:
                self._at = _At.BROKEN
                return
            if self._early:
                self._pass_arguments(self._early, events)
        self._collected = ""
