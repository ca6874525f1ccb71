"""The return of replicas that have died: the frontend that owns the engine starts them again.

A frontend that has joined the engine starts nothing. It waits for the owner's news on its line.
The owner also decides which suspects of a death run when (probation/judge.py).
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from sidestep.frontend.placement.placer import Placer
from sidestep.frontend.replicas.crash_file import CrashFiles
from sidestep.frontend.replicas.engine_client import Channel, Death, EngineClient
from sidestep.frontend.replicas.probation.judge import Judge
from sidestep.frontend.replicas.restart_budget import RestartBudget
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.core_args import OWNER, Seat, StartAgain
from sidestep.ipc.transport.black_box import Recorded
from sidestep.ipc.transport.channels import FrontendChannel
from sidestep.ipc.transport.messages import Answer, Ready, WorkersChanged
from sidestep.ipc.transport.owner_line import (
    Back,
    Blamed,
    Claimed,
    Down,
    GuestEnd,
    Leaving,
    Left,
    Lost,
    News,
    Parked,
    Passed,
    Path,
    Silent,
    Suspected,
    Turn,
)

logger = logging.getLogger(__name__)

_END_S = 5.0
"""Seconds for the last messages of a core whose death the owner has told."""


class Host(Protocol):
    """The part of ReplicaSet that a supervisor uses."""

    def replace_client(self, replica: int, channel: Channel, client: int) -> EngineClient:
        """Give a replica a new client, and let go of the old one."""

    def attach_client(self, replica: int) -> None:
        """Bind a replica's new client to the event loop, if there is one."""

    def recorded(self, replica: int) -> Recorded | None:
        """Return what the core of a replica that has died has noted."""

    def died(self, replica: int, death: Death) -> None:
        """Take note of a replica's death."""

    def lost(self, replica: int, cause: str) -> None:
        """Take note that a replica stays dead."""

    def expect(self, replica: int) -> None:
        """Take note that a replica joins, if it was absent."""

    def hear_leaving(self, news: Leaving) -> None:
        """Send nothing more to a replica that is to leave."""

    def hear_left(self, replica: int) -> None:
        """Do without a replica that has left."""

    def owner_has_ended(self) -> None:
        """Take note that no replica will come back."""

    def may_hear_of(self, replica: int) -> bool:
        """Return whether messages of a replica may still come."""

    def take_decision(self, decision: Claimed | Turn | Parked | Blamed) -> None:
        """Carry out a decision about suspects, here and at the guests."""

    def ask_idle(self, replica: int) -> asyncio.Future[Answer]:
        """Ask a replica whether it has nothing to do."""


class Supervisor(abc.ABC):
    """The part of a frontend that brings replicas back."""

    @abc.abstractmethod
    def restart(self, replica: int, death: Death, last: Ready | None) -> str | None:
        """Bring a replica back that has died.

        last: what it said when it began to serve. Return None if it is coming back, else the cause
        for which it stays dead.
        """

    @abc.abstractmethod
    def has_judge(self, death: Death) -> bool:
        """Return whether suspects of a death will get their turns."""

    @abc.abstractmethod
    def moved(self, replica: int, cause: str, *, returns: bool, of_host: bool) -> None:
        """Take note that the requests of a replica that has died have moved, or are held.

        returns: whether the replica is being started again. of_host: whether its host has gone.
        """

    @abc.abstractmethod
    def serves(self, replicas: Iterable[int]) -> None:
        """Take note of replicas that serve."""

    @abc.abstractmethod
    def report(self, number: int, suspects: list[tuple[int, Path]]) -> None:
        """Report the suspects of this frontend and its guests, in answer to a claim."""

    @abc.abstractmethod
    def passed(self, suspects: list[Path]) -> None:
        """Report suspects that have passed."""

    @abc.abstractmethod
    def take_news(self) -> None:
        """Take what the owner has told."""

    @abc.abstractmethod
    def workers_changed(self, replica: int, change: WorkersChanged) -> None:
        """Take note of what a call has changed of a replica's workers."""

    @abc.abstractmethod
    def is_outdated(self, replica: int) -> str | None:
        """Return why a replica that has just begun to serve cannot be used; None if it can."""

    @abc.abstractmethod
    def silent(self, replica: int) -> None:
        """Take note that a replica's core does not answer this frontend."""

    @abc.abstractmethod
    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind the connection to the owner to an event loop."""

    @abc.abstractmethod
    def close(self) -> None:
        """Bring nothing back from now on. May be called twice."""


class OwnSupervisor(Supervisor):
    """Starts the processes of replicas again, in the process that started the engine."""

    def __init__(
        self,
        config: EngineConfig,
        host: Host,
        crash_files: CrashFiles,
        placer: Placer,
        open_channel: Callable[[], Channel],
    ) -> None:
        """Start nothing yet. open_channel: makes the channel to a core that is started again."""
        self._placer = placer
        self._config = config
        self._host = host
        self._crash_files = crash_files
        self._budget = RestartBudget(config.frontend.restart_limit)
        self._open_channel = open_channel
        self._judge = Judge(host.take_decision, host.ask_idle)
        self._asleep: set[int] = set()
        self._weights: str | None = None
        """Folder of the weights that the engine uses now, if they are not those of its start."""
        self._started_with: dict[int, str | None] = {}
        """By replica: the weights of its last start."""
        self._left: dict[int, tuple[int, ...]] = {}
        """By replica that has left: its processes, which may still be ending."""

    def restart(self, replica: int, death: Death, last: Ready | None) -> str | None:
        """Start a replica again, after a pause, unless its budget is spent.

        Write its crash file first. The log names it, and no error does: clients elsewhere read
        errors.
        """
        recorded = self._host.recorded(replica)
        path = self._crash_files.write(replica, death.cause, death.origin, last, recorded)
        if path is not None:
            logger.error("replica %d: see sidestep trace --crash %s", replica, path)
        return self._start(replica, death, last)

    def _start(self, replica: int, death: Death, last: Ready | None) -> str | None:
        if death.is_final:
            return death.cause
        if replica in self._asleep:
            return f"{death.cause}; it slept, and what sleeps is not started again"
        is_free = death.origin == "host" or self._judge.is_free(replica)
        delay_s = self._budget.take_free(replica) if is_free else self._budget.take(replica)
        if delay_s is None:
            return death.cause + self._budget.spent(replica)
        pids = () if last is None else (last.core_pid, *last.worker_pids)
        try:
            self._place(replica, StartAgain(self._budget.total(replica), delay_s, pids))
        except OSError as error:  # no descriptor or no process can be had
            return f"{death.cause}; it cannot be started again: {error}"
        return None

    def _place(self, replica: int, again: StartAgain) -> None:
        """Start a core for a replica. Raises OSError."""
        client = self._host.replace_client(replica, self._open_channel(), OWNER)
        client.start_core(self._placer, with_weights(self._config, self._weights), replica, again)
        self._started_with[replica] = self._weights
        self._host.attach_client(replica)

    @property
    def sleeps(self) -> bool:
        """Whether replicas sleep."""
        return bool(self._asleep)

    def bring(self, replica: int) -> None:
        """Start a replica that joins."""
        again = StartAgain(self._budget.total(replica), 0.0, self._left.pop(replica, ()))
        try:
            self._place(replica, again)
        except OSError as error:
            self._host.lost(replica, f"it cannot be started: {error}")

    def retires(self, replica: int, last: Ready) -> None:
        """Run no suspects on a replica that is to leave. last: what it said when it began."""
        self._left[replica] = (last.core_pid, *last.worker_pids)
        self._judge.died(replica, "", returns=False, of_host=False)

    def has_judge(self, death: Death) -> bool:
        """Return True: this frontend decides."""
        return True

    def moved(self, replica: int, cause: str, *, returns: bool, of_host: bool) -> None:
        """Let the suspects run in probation."""
        self._judge.died(replica, cause, returns=returns, of_host=of_host)

    def serves(self, replicas: Iterable[int]) -> None:
        """Let suspects run there, if it is their turn."""
        for replica in replicas:
            self._judge.serves(replica)

    def report(self, number: int, suspects: list[tuple[int, Path]]) -> None:
        """Take the suspects of all frontends."""
        self._judge.report(number, suspects)

    def passed(self, suspects: list[Path]) -> None:
        """Take what has passed at all frontends."""
        self._judge.passed(suspects)

    def take_news(self) -> None:
        """Do nothing: this is the owner."""

    def workers_changed(self, replica: int, change: WorkersChanged) -> None:
        """Remember it for the next start."""
        self._asleep.discard(replica)
        if change.sleep_level:
            self._asleep.add(replica)
        if change.weights is not None:
            self._weights = change.weights

    def is_outdated(self, replica: int) -> str | None:
        """Return the reason if the engine got other weights while the replica started."""
        if self._started_with.get(replica) == self._weights:
            return None
        return "its weights have been replaced while it started"

    def silent(self, replica: int) -> None:
        """Do nothing: the watch ends it if it stays silent."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask again what has been asked in another event loop."""
        self._judge.attach()

    def close(self) -> None:
        """Do nothing: the clients end the cores."""


class GuestSupervisor(Supervisor):
    """Takes the owner's news."""

    def __init__(self, config: EngineConfig, host: Host, line: GuestEnd) -> None:
        """Use a line that is connected."""
        self._host = host
        self._line = line
        self._is_possible = config.frontend.restart_limit > 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: deque[News] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def restart(self, replica: int, death: Death, last: Ready | None) -> str | None:
        """Wait for the owner, unless it has ended."""
        # After a message that could not be used the core lives, and the owner does nothing.
        if not self._is_possible or not self._line.is_open or death.is_final:
            return death.cause
        return death.cause if death.origin == "message" else None

    def workers_changed(self, replica: int, change: WorkersChanged) -> None:
        """Do nothing: the owner knows."""

    def is_outdated(self, replica: int) -> str | None:
        """Return None: the owner has seen to it."""
        return None

    def silent(self, replica: int) -> None:
        """Let the owner watch it, which may have no requests there itself."""
        self._line.tell(Silent(replica))

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Listen to the owner."""
        self._loop = loop
        if self._line.is_open:
            loop.add_reader(self._line.fileno(), self.take_news)
            self._line.tell(Passed([]))  # from now on it answers claims

    def has_judge(self, death: Death) -> bool:
        """Return whether the owner lives and knows of the death."""
        return self._line.is_open and death.origin != "message"

    def moved(self, replica: int, cause: str, *, returns: bool, of_host: bool) -> None:
        """Go on with the owner's news, which may have waited for this."""
        if self._news and self._loop is not None:
            self._loop.call_soon(self._use_news)

    def serves(self, replicas: Iterable[int]) -> None:
        """Do nothing: the owner knows."""

    def report(self, number: int, suspects: list[tuple[int, Path]]) -> None:
        """Tell the owner."""
        self._line.tell(Suspected(number, suspects))

    def passed(self, suspects: list[Path]) -> None:
        """Tell the owner."""
        self._line.tell(Passed(suspects))

    def take_news(self) -> None:
        """Take the news that have come."""
        was_open = self._line.is_open
        self._news += self._line.receive()
        self._use_news()
        if was_open and not self._line.is_open:
            self.close()
            self._host.owner_has_ended()

    def _use_news(self) -> None:
        """Use the news in order.

        A death waits for the last messages of the core, which say what had begun there.
        """
        while self._news:
            news = self._news[0]
            if isinstance(news, Down | Lost) and self._waits(news):
                return
            self._news.popleft()
            self._use(news)

    def _use(self, news: News) -> None:
        if isinstance(news, Down):
            self._host.died(news.replica, Death(news.cause, "host" if news.of_host else "core"))
        elif isinstance(news, Lost):
            self._host.lost(news.replica, news.cause)
        elif isinstance(news, Back):
            self._take_seat(news.seat)
        elif isinstance(news, Leaving):
            self._host.hear_leaving(news)
        elif isinstance(news, Left):
            self._host.hear_left(news.replica)
        else:
            self._host.take_decision(news)

    def _waits(self, news: Down | Lost) -> bool:
        """Return whether the core that has died may still have a message here, for a while."""
        if self._loop is None or not self._line.is_open or not self._host.may_hear_of(news.replica):
            return False
        if self._timer is None:
            self._timer = self._loop.call_later(_END_S, self._end, news)
        return True

    def _end(self, news: Down | Lost) -> None:
        self._timer = None
        if self._news and self._news[0] is news:
            self._use(self._news.popleft())
        self._use_news()

    def _take_seat(self, seat: Seat) -> None:
        self._host.expect(seat.replica)
        self._host.died(seat.replica, Death("the engine core has ended"))
        try:
            channel = FrontendChannel(seat.address)
        except EngineStartError:
            return  # it has died again, and the owner will tell
        self._host.replace_client(seat.replica, channel, seat.client)
        self._host.attach_client(seat.replica)

    def close(self) -> None:
        """Leave the engine."""
        if self._loop is not None and not self._loop.is_closed() and self._line.fileno() >= 0:
            self._loop.remove_reader(self._line.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._line.close()


def with_weights(config: EngineConfig, folder: str | None) -> EngineConfig:
    """Return the configuration of an engine whose weights come from a folder; None: its own."""
    if folder is None:
        return config
    return dataclasses.replace(
        config,
        spec=msgspec.structs.replace(config.spec, path=folder),
        model=dataclasses.replace(config.model, load_format="auto"),
    )
