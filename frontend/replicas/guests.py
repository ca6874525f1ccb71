"""The frontends that have joined an engine, as the frontend that has invited them sees them.

Each has a line (ipc/transport/owner_line.py). When a replica serves again, each guest gets a new
seat there: the core is asked to connect to a new address, at which the guest then listens.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from sidestep.ipc.common.errors import SidestepError
from sidestep.ipc.processes.addresses import ClientAddress, remove_address
from sidestep.ipc.processes.core_args import Seat
from sidestep.ipc.transport.owner_line import (
    Back,
    Down,
    Left,
    Loaded,
    Lost,
    News,
    OwnerEnd,
    Passed,
    Silent,
    Suspected,
)

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Hears of guests, each by its number."""

    def joined(self, guest: int) -> None:
        """Take note of a guest that has joined."""

    def take_report(self, guest: int, report: Suspected | Passed) -> None:
        """Take a report of a guest about suspects."""

    def left(self, guest: int) -> None:
        """Take note that a guest has left."""


@dataclass(eq=False)
class _Guest:
    """A frontend that has been invited."""

    number: int
    end: OwnerEnd
    seats: set[int]
    """The replicas at which it has a seat, or will have one that the core has been asked for."""
    attends: bool = False
    """Whether it has reported: its event loop has run."""
    invited_to: list[ClientAddress] = field(default_factory=list)
    """The addresses in its invitation, which it may use as long as it has not left."""
    load: Loaded = Loaded(0.0, 0)
    """Its last load."""
    given: dict[int, ClientAddress] = field(default_factory=dict)
    """By replica: the address of a seat that it got on the line."""


class Guests:
    """All of them. The methods belong to the event loop's thread, except for `close`."""

    def __init__(
        self,
        connect: Callable[[int, ClientAddress], Awaitable[int]],
        alive: Callable[[], Iterable[int]],
        dead: Callable[[], Mapping[int, str]],
        suspect: Callable[[int], None],
        new_address: Callable[[], ClientAddress],
        absent: Callable[[], Iterable[int]],
        on_load: Callable[[], None],
    ) -> None:
        """Begin without guests.

        connect: lets the core of a replica serve a frontend at an address, and returns the
        frontend's number there. alive: the replicas that serve. dead: those that stay dead, each
        with the cause. suspect: called with a replica whose core does not answer a guest.
        new_address: returns an address at which a guest can listen. absent: the replicas that the
        load does not need now. on_load: called when a guest has told its load.
        """
        self._absent = absent
        self._on_load = on_load
        self._new_address = new_address
        self._suspect = suspect
        self._connect = connect
        self._alive = alive
        self._dead = dead
        self.listener: Listener | None = None
        self._guests: list[_Guest] = []
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"Guests({len(self._guests)})"

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the lines to an event loop."""
        self._loop = loop
        for guest in self._guests:
            loop.add_reader(guest.end.fileno(), self._on_readable, guest)

    def invite(self, seats: Sequence[Seat]) -> str:
        """Expect another guest, and return the path of its line. seats: those of its invitation."""
        assert self._loop is not None, "attach() comes first"
        replicas = {seat.replica for seat in seats}
        addresses = [seat.address for seat in seats]
        guest = _Guest(next(self._numbers), OwnerEnd(), replicas, invited_to=addresses)
        self._guests.append(guest)
        self._loop.add_reader(guest.end.fileno(), self._on_readable, guest)
        return guest.end.path

    def down(self, replica: int, cause: str, *, of_host: bool) -> None:
        """Tell all that a replica has died and is being started again."""
        self._forget_seats(replica)
        self.tell_all(Down(replica, cause, of_host))

    def lost(self, replica: int, cause: str) -> None:
        """Tell all that a replica stays dead."""
        self._forget_seats(replica)
        self.tell_all(Lost(replica, cause))

    def tell_left(self, replica: int) -> None:
        """Tell all that a replica has left."""
        self._forget_seats(replica)
        self.tell_all(Left(replica))

    @property
    def loads(self) -> list[Loaded]:
        """The last load of each guest."""
        return [guest.load for guest in self._guests]

    def tell_all(self, news: News) -> None:
        """Send all guests news."""
        for guest in self._guests.copy():
            self._tell(guest, news)

    def back(self, replica: int) -> None:
        """Give all a seat at a replica that serves again."""
        for guest in self._guests:
            self._give_seat(guest, replica)

    @property
    def attending(self) -> list[int]:
        """The numbers of the guests that have reported once: they read their lines."""
        return [guest.number for guest in self._guests if guest.attends]

    def tell(self, guest: int, news: News) -> None:
        """Send one guest news."""
        for each in self._guests.copy():
            if each.number == guest:
                self._tell(each, news)

    def close(self) -> None:
        """End all lines. May be called twice."""
        for guest in self._guests:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(guest.end.fileno())
            self._drop(guest)
        self._guests.clear()

    def _on_readable(self, guest: _Guest) -> None:
        assert self._loop is not None
        if guest.end.is_connected:
            for report in guest.end.receive():
                guest.attends = True
                if isinstance(report, Silent):
                    self._suspect(report.replica)
                elif isinstance(report, Loaded):
                    guest.load = report
                    self._on_load()
                elif self.listener is not None:
                    self.listener.take_report(guest.number, report)
            if not guest.end.is_open:
                self._leave(guest)
            return
        self._loop.remove_reader(guest.end.fileno())
        try:
            guest.end.accept()
        except OSError as error:
            logger.warning("a frontend could not join: %s", error)
            self._leave(guest)
            return
        self._loop.add_reader(guest.end.fileno(), self._on_readable, guest)
        # Tell it what has happened since it was invited.
        for replica, cause in self._dead().items():
            self._tell(guest, Lost(replica, cause))
        for replica in self._absent():
            self._tell(guest, Left(replica))
        if self.listener is not None:
            self.listener.joined(guest.number)
        for replica in self._alive():
            self._give_seat(guest, replica)

    def _give_seat(self, guest: _Guest, replica: int) -> None:
        if replica not in guest.seats and guest.end.is_connected:
            guest.seats.add(replica)
            task = asyncio.ensure_future(self._seat(guest, replica))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _seat(self, guest: _Guest, replica: int) -> None:
        with suppress(SidestepError):  # the replica has died again: it gets a seat at the next one
            address = guest.given[replica] = self._new_address()
            number = await self._connect(replica, address)
            if guest.given.get(replica) is address:
                self._tell(guest, Back(Seat(replica, number, address)))

    def _forget_seats(self, replica: int) -> None:
        for guest in self._guests:
            guest.seats.discard(replica)
            if (address := guest.given.pop(replica, None)) is not None:
                remove_address(address)

    def _tell(self, guest: _Guest, news: News) -> None:
        if guest.end.is_connected and not guest.end.tell(news):
            self._leave(guest)

    def _leave(self, guest: _Guest) -> None:
        if guest in self._guests:
            assert self._loop is not None
            self._loop.remove_reader(guest.end.fileno())
            self._guests.remove(guest)
            self._drop(guest)
            if self.listener is not None:
                self.listener.left(guest.number)

    def _drop(self, guest: _Guest) -> None:
        guest.end.close()
        for address in (*guest.invited_to, *guest.given.values()):
            remove_address(address)
