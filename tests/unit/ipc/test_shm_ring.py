"""The ring: every reader gets every message, whole and in order, at all sizes and speeds."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidestep.ipc.processes.process import spawn
from sidestep.ipc.transport.shm_ring import (
    RingClosed,
    RingDamagedError,
    RingReader,
    RingWriter,
    create_ring,
)


def read_all(reader: RingReader, count: int, into: list[tuple[int, bytes]]) -> None:
    for _ in range(count):
        assert reader.wait(30)
        message = reader.receive()
        assert message is not None
        into.append((message[0], bytes(message[1])))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.binary(max_size=700), min_size=1, max_size=40), st.integers(1, 3), st.integers(2, 5)
)
def test_every_reader_gets_every_message_in_order(
    messages: list[bytes], readers: int, slots: int
) -> None:
    spec = create_ring(readers, slots, slot_bytes=256)
    writer = RingWriter(spec)
    got: list[list[tuple[int, bytes]]] = [[] for _ in range(readers)]
    threads = [
        threading.Thread(target=read_all, args=(RingReader(spec, r), len(messages), got[r]))
        for r in range(readers)
    ]
    for thread in threads:
        thread.start()
    for kind, message in enumerate(messages):
        writer.send([message[:100], message[100:]], kind)
    for thread in threads:
        thread.join()
    for fd in (spec.memory, *spec.bells_in, *spec.bells_out):
        os.close(fd)
    assert got == [list(enumerate(messages))] * readers


def test_a_slot_is_not_overwritten_while_it_is_being_read() -> None:
    spec = create_ring(1, 2, slot_bytes=64)
    writer, reader = RingWriter(spec), RingReader(spec, 0)
    writer.send([b"first"])
    message = reader.receive()
    assert message is not None
    writer.send([b"second"])
    with pytest.raises(
        RingClosed
    ):  # both slots are taken: the one held by the reader and the one not yet read
        writer.send([b"third"], timeout_s=0.01)
    assert bytes(message[1]) == b"first"


def test_a_writer_that_waits_for_room_learns_that_a_reader_has_ended() -> None:
    spec = create_ring(2, 2, slot_bytes=64)
    writer, reader = RingWriter(spec), RingReader(spec, 0)
    for _ in range(2):
        writer.send([b"text"])
        assert reader.receive() is not None
    os.close(spec.bells_in[1])  # as its process's end does, with two messages unread
    with pytest.raises(RingClosed, match="the reader has gone"):
        writer.send([b"text"], timeout_s=60)


def test_receive_on_an_empty_ring_gives_nothing_and_wait_ends_in_time() -> None:
    spec = create_ring(1)
    reader = RingReader(spec, 0)
    assert reader.receive() is None
    assert reader.wait(0.01) is False


def test_a_reader_learns_that_the_writers_process_has_ended_after_reading_what_it_wrote() -> None:
    spec = create_ring(1)
    child = spawn(
        "writer", "tests.unit.ipc.children:write_one_message", spec, pass_fds=spec.writer_fds()
    )
    os.close(spec.bells_out[0])
    reader = RingReader(spec, 0)
    assert reader.wait(30)
    message = reader.receive()
    assert message is not None and bytes(message[1]) == b"hello"
    with pytest.raises(RingClosed):
        reader.wait(30)
    child.stop()


def test_the_memory_has_no_name(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    create_ring(1)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after <= before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no unnamed memory")
def test_a_ring_needs_no_room_in_shared_memory_that_containers_bound() -> None:
    spec = create_ring(1)
    assert os.readlink(f"/proc/self/fd/{spec.memory}").startswith("/memfd:")
    for descriptor in (spec.memory, *spec.bells_in, *spec.bells_out):
        os.close(descriptor)


class NoisyReader(RingReader):
    """A reader that sees one bit of a slot changed."""

    changed_slot = 0
    changed_byte = 0

    def _arrived(self, kind: int, payload: memoryview) -> memoryview:
        seen = bytearray(payload)
        if self._count == self.changed_slot:
            seen[self.changed_byte] ^= 1
        return memoryview(seen)


@pytest.mark.parametrize(
    ("size", "slot", "byte"), [(1, 0, 0), (256, 0, 255), (700, 1, 100), (700, 2, 5)]
)
def test_a_message_that_was_changed_on_its_way_is_refused(size: int, slot: int, byte: int) -> None:
    spec = create_ring(1, 4, slot_bytes=256)
    writer, reader = RingWriter(spec), NoisyReader(spec, 0)
    reader.changed_slot, reader.changed_byte = slot, byte
    writer.send([bytes(size)])
    with pytest.raises(RingDamagedError, match="not as it was written"):
        reader.receive()


def test_a_message_in_the_place_of_another_is_refused() -> None:
    spec = create_ring(1, 2, slot_bytes=64)
    writer, reader, late = RingWriter(spec), RingReader(spec, 0), RingReader(spec, 0)
    for text in (b"one", b"two", b"three"):
        writer.send([text])
        assert (message := reader.receive()) is not None and bytes(message[1]) == text
    assert reader.receive() is None
    with pytest.raises(RingDamagedError, match="message 0 of a ring"):
        late.receive()
