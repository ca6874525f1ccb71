"""A ring of messages in shared memory: one writer, many readers that all get every message.

The memory is an unlinked file and the doorbells are pipes, both inherited as descriptors. They have
no name, so nothing can clash and nothing is left behind. Layout: a counter of messages written, a
counter of messages read for each reader (each counter alone in its cache line), then fixed-size
slots; a message larger than a slot takes several.

Ordering: a slot is filled before the counter moves, and the doorbell is rung after that. A reader
that is woken by the doorbell is ordered by the kernel. One that looks at the counter again and
again (`has_message`) relies on stores becoming visible in order, so that is done on x86 only, and
where there are cores to spare.
"""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from sidestep.ipc.config import available_cores

_LINE = 64
"""Bytes of a cache line."""
_SLOT_HEADER = struct.Struct("<IHHII")
"""Bytes in this slot, kind of message, whether the message goes on in the next slot, checksum, and
nothing, so that payloads begin at multiples of 8 bytes."""
DEFAULT_SLOT_BYTES = 1 << 18
"""Bytes of payload in a slot."""
DEFAULT_SLOTS = 16
"""Slots of a ring."""
SPIN_S = 10e-3 if platform.machine() in ("x86_64", "AMD64") and available_cores() > 4 else 0.0
"""Seconds for which a process looks for its next message before it blocks.

They are longer than most decode steps take. 0 if the machine is not an x86, or has 4 cores or
fewer.
"""


class RingClosed(Exception):
    """The writer's process has ended (for a reader) or no reader makes room (for a writer)."""


class RingDamagedError(Exception):
    """A message is not the one that was written."""


@dataclass(frozen=True)
class RingSpec:
    """The descriptors of a ring, by which another process attaches."""

    memory: int
    bells_in: tuple[int, ...]
    """Read end of each reader's doorbell."""
    bells_out: tuple[int, ...]
    """Write end of each reader's doorbell."""
    num_slots: int
    slot_bytes: int

    @property
    def num_readers(self) -> int:
        """Number of readers, which must all have read a slot before it is written again."""
        return len(self.bells_in)

    def writer_fds(self) -> tuple[int, ...]:
        """Return the descriptors that the writer's process needs."""
        return (self.memory, *self.bells_out)

    def reader_fds(self, reader: int) -> tuple[int, ...]:
        """Return the descriptors that one reader's process needs."""
        return (self.memory, self.bells_in[reader])


def create_ring(
    num_readers: int, num_slots: int = DEFAULT_SLOTS, slot_bytes: int = DEFAULT_SLOT_BYTES
) -> RingSpec:
    """Allocate the memory (untouched pages cost nothing) and the doorbells."""
    memory = unnamed_memory()
    os.ftruncate(memory, _size(num_readers, num_slots, slot_bytes))
    pipes = [os.pipe() for _ in range(num_readers)]
    for ends in pipes:
        for end in ends:
            os.set_blocking(end, False)
    return RingSpec(
        memory, tuple(p[0] for p in pipes), tuple(p[1] for p in pipes), num_slots, slot_bytes
    )


def unnamed_memory() -> int:
    """Return the descriptor of an empty file without a name.

    memfd_create needs no room in /dev/shm, which containers keep small, and where writing beyond
    the room ends the process by SIGBUS.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sidestep-ring")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _checksum(payload: memoryview, count: int) -> int:
    """Return the checksum of a payload as the ring's slot with this number."""
    return zlib.crc32(payload, count & 0xFFFFFFFF)


def _size(num_readers: int, num_slots: int, slot_bytes: int) -> int:
    return _LINE * (1 + num_readers) + num_slots * (_SLOT_HEADER.size + slot_bytes)


class _Ring:
    def __init__(self, spec: RingSpec) -> None:
        self._spec = spec
        self._map = mmap.mmap(spec.memory, _size(spec.num_readers, spec.num_slots, spec.slot_bytes))
        self._data = memoryview(self._map)
        self._counters = self._data[: _LINE * (1 + spec.num_readers)].cast("Q")
        self._first_slot = _LINE * (1 + spec.num_readers)
        self._stride = _SLOT_HEADER.size + spec.slot_bytes
        self._count = 0

    def _slot(self, count: int) -> int:
        return self._first_slot + count % self._spec.num_slots * self._stride

    @staticmethod
    def _reader_counter(reader: int) -> int:
        return (1 + reader) * (_LINE // 8)


class RingWriter(_Ring):
    """The writing end. Not thread-safe."""

    def __init__(self, spec: RingSpec) -> None:
        super().__init__(spec)
        self._read_counters = [self._reader_counter(r) for r in range(spec.num_readers)]

    def send(
        self, parts: Iterable[bytes | memoryview], kind: int = 0, timeout_s: float = 30.0
    ) -> None:
        """Write one message made of byte buffers.

        Waits while the ring is full; raises RingClosed if no reader makes room in `timeout_s`
        seconds.
        """
        offset, room, start = self._open_slot(timeout_s)
        for part in parts:
            view = memoryview(part)
            while len(view):
                if room == 0:
                    self._close_slot(start, kind, offset, more=True)
                    offset, room, start = self._open_slot(timeout_s)
                chunk = view[:room]
                self._data[offset : offset + len(chunk)] = chunk
                offset, room, view = offset + len(chunk), room - len(chunk), view[len(chunk) :]
        self._close_slot(start, kind, offset, more=False)

    def _open_slot(self, timeout_s: float) -> tuple[int, int, int]:
        """Return the start of the payload, its room in bytes, and the start of the slot."""
        if self._is_full():
            self._wait_for_room(timeout_s)
        start = self._slot(self._count)
        return start + _SLOT_HEADER.size, self._spec.slot_bytes, start

    def _close_slot(self, start: int, kind: int, end: int, *, more: bool) -> None:
        first = start + _SLOT_HEADER.size
        checksum = self._seal(self._data[first:end])
        _SLOT_HEADER.pack_into(self._data, start, end - first, kind, more, checksum, 0)
        self._count += 1
        self._counters[0] = self._count
        for bell in self._spec.bells_out:
            try:
                os.write(bell, b"\0")
            except BlockingIOError:
                pass  # the pipe is full of rings that the reader has yet to see
            except BrokenPipeError:
                raise RingClosed("the reader has gone") from None

    def _seal(self, payload: memoryview) -> int:
        """Return the checksum of the next slot's payload; tests change the payload behind it."""
        return _checksum(payload, self._count)

    def _is_full(self) -> bool:
        return (
            self._count - min(self._counters[c] for c in self._read_counters)
            >= self._spec.num_slots
        )

    def _wait_for_room(self, timeout_s: float) -> None:
        # This is rare (a message of many slots, or a reader that lags): polling keeps the common
        # path free of a second bell.
        end = time.monotonic() + timeout_s
        readers = select.poll()
        for bell in self._spec.bells_out:
            readers.register(bell, 0)  # errors are reported all the same
        while self._is_full():
            if readers.poll(0):
                raise RingClosed("the reader has gone")
            if time.monotonic() > end:
                raise RingClosed(f"no reader made room in {timeout_s} s")
            time.sleep(50e-6)


class RingReader(_Ring):
    """One reading end. Not thread-safe."""

    def __init__(self, spec: RingSpec, reader: int) -> None:
        super().__init__(spec)
        self._bell = spec.bells_in[reader]
        self._counter = self._reader_counter(reader)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._held = 0
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when there may be a message, or no writer.

        `clear_bell` makes it unreadable again.
        """
        return self._bell

    @property
    def has_message(self) -> bool:
        """Whether `receive` has something."""
        return self._counters[0] > self._count

    def receive(self) -> tuple[int, memoryview] | None:
        """Return the next message as (kind, bytes); None if there is none.

        The bytes are valid until the next call. Raises RingDamagedError.
        """
        self._release()
        if self._counters[0] <= self._count:
            return None
        kind, more, view = self._read_slot()
        if not more:
            self._held = 1
            return kind, view
        return kind, self._receive_rest(bytearray(view))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until `receive` has something, and return True; False after `timeout_s` seconds.

        Raises RingClosed when the writer's process has ended and everything it wrote has been read.
        """
        self._release()
        while True:
            if self._counters[0] > self._count:
                return True
            if self._closed:
                raise RingClosed("the writer has gone")
            if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
                return False
            self.clear_bell()

    def clear_bell(self) -> bool:
        """Take all rings of the doorbell, and return whether the writer has gone."""
        try:
            while data := os.read(self._bell, 4096):
                if len(data) < 4096:
                    return self._closed
            self._closed = True
        except BlockingIOError:
            pass
        return self._closed

    def _receive_rest(self, message: bytearray) -> memoryview:
        """Join a message of several slots.

        Each slot is freed as it is copied, so that the writer can go on.
        """
        more = True
        while more:
            self._counters[self._counter] = self._count
            if not self.wait(30.0):
                raise RingClosed("the rest of a message did not come")
            _, more, view = self._read_slot()
            message += view
        self._held = 1
        return memoryview(message)

    def _read_slot(self) -> tuple[int, bool, memoryview]:
        """Return kind, whether the message goes on, and the payload of the next slot."""
        start = self._slot(self._count)
        length, kind, more, checksum, _ = _SLOT_HEADER.unpack_from(self._data, start)
        first = start + _SLOT_HEADER.size
        view = self._arrived(kind, self._data[first : first + length])
        if _checksum(view, self._count) != checksum:
            raise RingDamagedError(
                f"message {self._count} of a ring is not as it was written "
                f"({length} bytes, kind {kind})"
            )
        self._count += 1
        return kind, bool(more), view

    def _arrived(self, kind: int, payload: memoryview) -> memoryview:
        """Return the payload as this process sees it; tests change it here on its way."""
        return payload

    def _release(self) -> None:
        if self._held:
            self._held = 0
            self._counters[self._counter] = self._count
