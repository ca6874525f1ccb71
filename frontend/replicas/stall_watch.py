"""The watch for replicas that make no progress while requests wait: a hung core or worker.

A replica that sends tokens makes progress. The watch asks a silent replica: its core answers in
microseconds, with the time for which its steps in flight have had no output. The watch counts its
own turns and not seconds, and each turn of the event loop reads the answers that have arrived. So a
frontend that was delayed itself suspects no replica.

The watch asks nothing of an engine without requests, so such an engine stays asleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sidestep.ipc.transport.messages import Answer

TURN_S = 0.5
"""Seconds between two turns of the watch."""
STALL_S = 2.0
"""Seconds without progress after which a replica counts as stalled.

Progress is an answer, or an output of a step in flight.
"""
_MOST_TURNS = int(STALL_S / TURN_S)
_MOST_PATIENCE_S = 64.0
"""Largest limit, in seconds, for a step without an output.

A replica's limit doubles, up to this, each time that it turns out to be slow and not stalled.
"""
_NO_PROGRESS = "the steps in flight make no progress"


@dataclass(slots=True, eq=False)
class _Look:
    """The watch's state of one replica."""

    told_tokens: bool = False
    """Whether tokens have come since the last turn."""
    asked: asyncio.Future[Answer] | None = None
    turns: int = 0
    """Turns since the replica was asked."""
    stalled: str | None = None
    """Why the replica counts as stalled; None if it does not."""


class StallWatch:
    """The watch of the replicas that have requests.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        ping: Callable[[int], asyncio.Future[Answer]],
        busy: Callable[[], Iterable[int]],
        on_change: Callable[[int, str | None], None],
    ) -> None:
        """Watch no replica yet.

        ping: asks a replica. busy: returns the replicas with requests in flight. on_change: called
        with the reason when a replica stalls, and with None when it makes progress again.
        """
        self._ping = ping
        self._busy = busy
        self._on_change = on_change
        self._looks: dict[int, _Look] = {}
        self._patience_s: dict[int, float] = {}
        """Seconds that a step may take, for replicas that turned out to be slow and not stalled."""
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"StallWatch(watched={sorted(self._looks)}, stalled={sorted(self.stalled)})"

    @property
    def stalled(self) -> dict[int, str]:
        """The replicas that make no progress, each with the reason."""
        return {
            replica: look.stalled
            for replica, look in self._looks.items()
            if look.stalled is not None
        }

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch: there are requests in flight."""
        if self._timer is None and not loop.is_closed():
            self._timer = loop.call_later(TURN_S, self._turn)

    def suspect(self, replica: int) -> None:
        """Watch a replica, also without requests.

        The reason is that it has not answered a question in time.
        """
        look = self._looks.setdefault(replica, _Look())
        if look.asked is None:
            look.asked, look.turns = self._ping(replica), 0
        self.wake(asyncio.get_running_loop())

    def told_tokens(self, replica: int) -> None:
        """Note that tokens have come from a replica."""
        if (look := self._looks.get(replica)) is not None:
            look.told_tokens = True
            if look.stalled is not None:
                self._mark(replica, look, None)

    def forget(self, replica: int) -> None:
        """Stop watching a replica that has died."""
        if (look := self._looks.pop(replica, None)) is not None and look.asked is not None:
            look.asked.cancel()

    def stop(self) -> None:
        """Stop watching; `wake` begins again, if need be in another event loop."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._looks.clear()

    def _turn(self) -> None:
        self._timer = None
        busy = set(self._busy())
        for replica in busy - self._looks.keys():
            self._looks[replica] = _Look(
                told_tokens=True
            )  # asked at the next turn if nothing comes
        for replica, look in list(self._looks.items()):
            if replica in busy or look.stalled is not None or look.asked is not None:
                self._look(replica, look)
            else:
                del self._looks[replica]
        if self._looks:
            self.wake(asyncio.get_running_loop())

    def _look(self, replica: int, look: _Look) -> None:
        if look.asked is None:
            if not look.told_tokens:
                look.asked, look.turns = self._ping(replica), 0
            look.told_tokens = False
        elif not look.asked.done():
            look.turns += 1
            if look.turns >= _MOST_TURNS and look.stalled is None:
                self._mark(replica, look, "the engine core does not answer")
        else:
            answer, look.asked = look.asked, None
            if answer.cancelled() or answer.exception() is not None:
                return  # it has died, or the engine was shut down
            seconds = (answer.result().result or {})["seconds_since_progress"]
            patience_s = self._patience_s.get(replica, STALL_S)
            if seconds > patience_s and look.stalled is None:
                self._mark(replica, look, _NO_PROGRESS)
            elif seconds <= patience_s and look.stalled is not None:
                self._mark(replica, look, None)

    def _mark(self, replica: int, look: _Look, reason: str | None) -> None:
        if (
            reason is None and look.stalled == _NO_PROGRESS
        ):  # a large step on a slow device looks the same
            self._patience_s[replica] = min(
                2 * self._patience_s.get(replica, STALL_S), _MOST_PATIENCE_S
            )
        look.stalled = reason
        self._on_change(replica, reason)
