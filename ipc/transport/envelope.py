"""The envelope of a frontend's message to the core: what the message is about, in a fixed form.

It comes before the message and is read first. So if the message cannot be read, or raises, the core
still knows whose it was: the sender by its connection, and the request or call by its number.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from sidestep.ipc.params.ranges import MAX_CHOICES
from sidestep.ipc.transport.messages import (
    AddRequest,
    Call,
    CallWorkers,
    Connect,
    ToCore,
    decode_to_core,
    encode,
)

_FORM = struct.Struct("<BBHi")
"""Mark, subject, count and number."""
_MARK = 0xE5
"""First byte of each message."""
MAX_HANDLE = 2**31 - 1
"""Handles and numbers of calls are columns of 32 bits."""


class Subject(enum.IntEnum):
    """The sort of thing that a message is about."""

    REQUEST = 0
    """A request, which waits for its tokens or its end."""
    CALL = 1
    """A call, which waits for its answer."""
    NOTE = 2
    """Nothing that waits."""


class Envelope(NamedTuple):
    """The subject of a message, and its number."""

    subject: Subject
    number: int
    """The request's first handle, or the call's number; 0 for a note."""
    num_handles: int
    """Number of the request's handles, which follow one another; else 1."""

    @property
    def handles(self) -> range:
        """The handles of the request's choices."""
        return range(self.number, self.number + self.num_handles)


class Refused(NamedTuple):
    """A message that the core cannot take."""

    client: int
    envelope: Envelope
    problem: str


def handles_of(message: AddRequest) -> range:
    """Return the handles of a request's choices. A search has one."""
    num = message.sampling.n if message.beam_search is None else 1
    return range(message.handle, message.handle + num)


def envelope_of(message: ToCore) -> Envelope:
    """Return the envelope of a message."""
    if isinstance(message, AddRequest):
        return Envelope(Subject.REQUEST, message.handle, len(handles_of(message)))
    if isinstance(message, Call | CallWorkers | Connect):
        return Envelope(Subject.CALL, message.call_id, 1)
    return Envelope(Subject.NOTE, 0, 1)


def seal(message: ToCore) -> bytes:
    """Return a message in its envelope, as bytes."""
    subject, number, count = envelope_of(message)
    return _FORM.pack(_MARK, subject, count, number) + encode(message)


def open_sealed(client: int, data: bytes) -> ToCore | Refused:
    """Return the message of a frontend in an envelope, or why the core cannot take it.

    client: the number of the frontend that it comes from. Raises ValueError if not even the
    envelope can be read.
    """
    envelope = _read(data)
    try:
        message = decode_to_core(memoryview(data)[_FORM.size :])
    except Exception as error:  # besides DecodeError there is RecursionError, for one
        return Refused(client, envelope, f"the engine could not read the message: {error}")
    if message.client != client:
        problem = f"the message says that it is of frontend {message.client}, not {client}"
    elif envelope_of(message) != envelope:
        problem = "the message is not what its envelope says"
    else:
        return message
    return Refused(client, envelope, f"the engine could not take the message: {problem}")


def _read(data: bytes) -> Envelope:
    if len(data) < _FORM.size:
        raise ValueError("it is shorter than an envelope")
    mark, subject, count, number = _FORM.unpack_from(data)
    if mark != _MARK or subject not in tuple(Subject):
        raise ValueError("it does not begin with an envelope")
    if not 0 < count <= MAX_CHOICES or not 0 <= number <= MAX_HANDLE + 1 - count:
        raise ValueError(f"its envelope has number {number} and count {count}")
    return Envelope(Subject(subject), number, count)
