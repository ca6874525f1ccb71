"""The watch for replicas that make no progress while somebody waits: a hung core or worker.

A replica that sends tokens makes progress. The watch asks a silent replica: its core answers in
microseconds, with the time for which its steps in flight have had no output. The watch counts its
own turns and not seconds, and each turn of the event loop reads the answers that have arrived. So a
frontend that was delayed itself suspects no replica.

A core that stays silent for the limit is ended, by the frontend that owns it. Workers that hang
under a core that answers are the core's to end (engine_core/progress.py).

The watch asks nothing of an engine without requests and questions, so such an engine stays asleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sidestep.frontend.placement.placer import PlacedCore
from sidestep.ipc.processes.cpu_use import CpuUse
from sidestep.ipc.transport.messages import Answer, Ready

TURN_S = 0.5
"""Most seconds between two turns of the watch."""
_LEAST_TURNS = 8
"""Fewest turns in the limit at which a core is ended."""
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
SILENT = "the engine core does not answer"


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


class CpuWorkers:
    """The workers of replicas that compute on a CPU."""

    def __init__(
        self,
        ready: Mapping[int, Ready],
        core: Callable[[int], PlacedCore | None],
        are_here: bool,
    ) -> None:
        """Look at nothing yet.

        ready: the first message of each replica that serves. core: returns the core of a replica,
        or None for another frontend's. are_here: whether such cores run on this machine.
        """
        self._ready, self._core, self._are_here = ready, core, are_here
        self._uses: dict[int, tuple[Ready, CpuUse]] = {}

    def compute(self, replica: int) -> bool:
        """Return whether a replica's workers have computed on a CPU since the last call."""
        ready = self._ready[replica]
        if ready.device_type == "cuda":
            return False
        if (core := self._core(replica)) is not None:
            return core.computes(ready.worker_pids)
        if not self._are_here:
            return False
        last, use = self._uses.get(replica, (None, None))
        if use is None or last is not ready:
            use = CpuUse(ready.worker_pids)
            self._uses[replica] = ready, use
        return use.has_grown()


class StallWatch:
    """The watch of the replicas that have requests or questions.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        ping: Callable[[int], asyncio.Future[Answer]],
        busy: Callable[[], Iterable[int]],
        on_change: Callable[[int, str | None], None],
        end: Callable[[int, str], None] = lambda replica, cause: None,
        computes: Callable[[int], bool] = lambda replica: False,
        limit_s: float = 0.0,
    ) -> None:
        """Watch no replica yet.

        ping: asks a replica. busy: returns the replicas with requests or questions in flight.
        on_change: called with the reason when a replica stalls, and with None when it makes
        progress again. end: called with the cause when a core has been silent for `limit_s`
        seconds; 0 for never. computes: whether a replica's workers have computed since the last
        call, so that the core may be waiting for them.
        """
        self._end, self._computes, self._limit_s = end, computes, limit_s
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

    def patience_s(self, replica: int) -> float:
        """Return the seconds that a step of a replica may take before the replica is stalled."""
        return self._patience_s.get(replica, min(STALL_S, self._limit_s / 2 or STALL_S))

    @property
    def _turn_s(self) -> float:
        return min(TURN_S, self._limit_s / _LEAST_TURNS or TURN_S)

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to watch: there are requests or questions in flight."""
        if self._timer is None and not loop.is_closed():
            self._timer = loop.call_later(self._turn_s, self._turn)

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
            look.turns = 0 if self._computes(replica) else look.turns + 1
            if look.turns >= _MOST_TURNS and look.stalled is None:
                self._mark(replica, look, SILENT)
            if 0 < self._limit_s <= look.turns * self._turn_s:
                self._end(replica, f"the engine core has not answered for {self._limit_s:g} s")
        else:
            answer, look.asked = look.asked, None
            if answer.cancelled() or answer.exception() is not None:
                return  # it has died, or the engine was shut down
            seconds = (answer.result().result or {})["seconds_since_progress"]
            patience_s = self.patience_s(replica)
            if seconds > patience_s and look.stalled is None:
                self._mark(replica, look, _NO_PROGRESS)
            elif seconds <= patience_s and look.stalled is not None:
                self._mark(replica, look, None)

    def _mark(self, replica: int, look: _Look, reason: str | None) -> None:
        if (
            reason is None and look.stalled == _NO_PROGRESS
        ):  # a large step on a slow device looks the same
            self._patience_s[replica] = min(2 * self.patience_s(replica), _MOST_PATIENCE_S)
        look.stalled = reason
        self._on_change(replica, reason)
