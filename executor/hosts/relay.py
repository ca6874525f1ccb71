"""A relay: runs ranks of a replica on another host than the core's, in the core's place there.

It starts the ranks as the core does on its own host. It copies the orders that come over the link
into their ring, and sends their replies back. It serves one core. When the link ends, whatever the
reason, it ends its ranks and then itself; the ranks' lifelines hang on it.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from sidestep.executor.hosts.host_ranks import Meeting, RanksJob, RelayJob
from sidestep.executor.hosts.link import Beat, BeatTaken, LinkKind, Parcel, RelayLink
from sidestep.executor.hosts.local_ranks import LocalRanks
from sidestep.executor.processes.step_failure import failure_text
from sidestep.executor.processes.worker_orders import Failure, Order, Reply
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.processes.process import decode_args, freeze_heap
from sidestep.ipc.processes.rank_hosts import RelayArgs
from sidestep.ipc.transport.shm_ring import SPIN_S, RingClosed

logger = logging.getLogger(__name__)
_CLOCK_LOOKS = 16
"""Number of the last round trips, the shortest of which compares the clocks."""
_COMPLAINT_S = 10.0
"""Least seconds between two lines of the log about strangers."""


def main(raw: bytes) -> None:
    """Run the process."""
    args = decode_args(raw, RelayArgs)
    link = RelayLink(args.address)
    with os.fdopen(args.report, "wb") as report:
        report.write(msgspec.json.encode(link.door))
    relay = Relay(link)
    freeze_heap()
    try:
        relay.run()
    finally:
        link.close()
        relay.end_ranks()


class Relay:
    """Passes on what comes over the link, and what the ranks say."""

    def __init__(self, link: RelayLink, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Begin without ranks. clock_ns: the monotonic clock of this host."""
        self._link = link
        self._clock_ns = clock_ns
        self._ranks: LocalRanks | None = None
        self._has_failed = False
        self._beat_s = 0.0
        self._next_beat: float | None = None
        """None until the ranks have been started."""
        self._round_trips: deque[tuple[int, int]] = deque(maxlen=_CLOCK_LOOKS)
        """Nanoseconds of a round trip, and by how many this clock is ahead, as it says."""
        self._told_refused = 0
        self._next_complaint = 0.0
        self._poll = select.poll()

    def run(self) -> None:
        """Pass on messages until the core has gone."""
        for fileno in self._link.filenos():
            self._poll.register(fileno, select.POLLIN)
        until = 0.0
        while True:
            # A send may use up the news of a parcel, so nothing may be sent between the last look
            # at the link and the wait.
            if self._turn():
                until = time.perf_counter() + SPIN_S
                continue
            if self._link.lost is not None:
                return
            if SPIN_S and time.perf_counter() < until:
                self._poll.poll(0)
            else:
                self._poll.poll(self._milliseconds_left())

    def end_ranks(self) -> None:
        """End the ranks, and wait for their end: they hold the memory of the device."""
        if self._ranks is not None:
            self._ranks.let_go()
            self._ranks.stop()

    def _turn(self) -> bool:
        """Pass on all that is there; return whether there was anything."""
        moved = False
        try:
            moved |= self._pass_replies()
            moved |= self._beat()
            while (parcel := self._link.receive()) is not None:
                moved = True
                self._obey(parcel)
        except RingClosed:
            # A rank has gone, which its doorbell says next, or the core has.
            return self._link.lost is None
        self._complain()
        return moved

    def _pass_replies(self) -> bool:
        """Send the core all that the ranks have said; return whether there was anything."""
        moved = False
        try:
            while self._ranks is not None and not self._has_failed:
                if (said := self._ranks.receive()) is None:
                    break
                moved, data = True, said.data
                if said.kind == Reply.GONE:
                    data = self._ranks.death_cause(said.rank).encode()
                self._link.send(said.kind, said.rank, [data])
        except EngineDeadError as error:  # a reply is damaged
            self._fail(str(error))
        return moved

    def _obey(self, parcel: Parcel) -> None:
        if parcel.kind < LinkKind.BEGIN:
            if self._ranks is not None:
                self._ranks.send([parcel.data], Order(parcel.kind))
        elif parcel.kind == LinkKind.BEGIN:
            self._begin(msgspec.json.decode(parcel.data, type=RelayJob))
        elif parcel.kind == LinkKind.ASK_DEVICES:
            ranks = LocalRanks(msgspec.json.decode(parcel.data, type=RanksJob))
            needs = msgspec.json.encode(ranks.what_devices_need())
            self._link.send(LinkKind.DEVICES, 0, [needs])
        elif parcel.kind == LinkKind.KILL and self._ranks is not None:
            self._ranks.kill()
        elif parcel.kind == LinkKind.BEAT_TAKEN:
            taken, now = msgspec.json.decode(parcel.data, type=BeatTaken), self._clock_ns()
            middle = (taken.sent_ns + now) // 2
            self._round_trips.append((now - taken.sent_ns, middle - taken.taken_ns))

    def _begin(self, relayed: RelayJob) -> None:
        """Start the ranks."""
        self._ranks = LocalRanks(relayed.job)
        try:
            self._ranks.launch(Meeting(relayed.rendezvous))
        except OSError:
            self._fail(failure_text())
            return
        for fileno in self._ranks.filenos():
            self._poll.register(fileno, select.POLLIN)
        self._beat_s, self._next_beat = relayed.beat_s, time.monotonic()

    def _fail(self, text: str) -> None:
        """Tell the core that the ranks of this host cannot go on, and hear them no more."""
        self._has_failed = True
        assert self._ranks is not None, "only ranks fail"
        failure = Failure(text, self._clock_ns())
        with suppress(RingClosed):  # the core has gone
            self._link.send(Reply.FAILED, self._ranks.ranks.start, [msgspec.json.encode(failure)])

    def _beat(self) -> bool:
        """Report the state of the host if it is time; return whether it was."""
        if self._next_beat is None or time.monotonic() < self._next_beat:
            return False
        assert self._ranks is not None, "the first beat follows the start"
        self._next_beat = time.monotonic() + self._beat_s
        used = self._ranks.cpu_time()
        beat = Beat(
            cpu_seconds=None if used is None else used.seconds,
            is_halted=used is not None and used.is_halted,
            num_refused=self._link.num_refused,
            sent_ns=self._clock_ns(),
            ahead_ns=min(self._round_trips)[1] if self._round_trips else 0,
        )
        self._link.send(LinkKind.BEAT, 0, [msgspec.json.encode(beat)])
        return True

    def _complain(self) -> None:
        """Log that strangers have been refused, now and then."""
        num_refused, now = self._link.num_refused, time.monotonic()
        if num_refused > self._told_refused and now >= self._next_complaint:
            self._told_refused, self._next_complaint = num_refused, now + _COMPLAINT_S
            logger.warning(
                "refused a connection without the key at the port of this relay, %d so far",
                num_refused,
            )

    def _milliseconds_left(self) -> float | None:
        if self._next_beat is None:
            return None
        return max(0.0, self._next_beat - time.monotonic()) * 1000
