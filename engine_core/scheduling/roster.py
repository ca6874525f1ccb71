"""The state of each request, and the changes from one state to another.

A request waits (in the queue, or outside of it for its grammar), runs (it has a slot and blocks),
or is leaving: it has ended or was preempted, but steps in flight still touch its slot and blocks.
Order of side effects: slots and blocks go back when the last step that touches them has come back,
never before (`release`).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain

from sidestep.engine_core.groups.group import (
    ForkingGroups,
    ending_with,
    entering_with,
    found_by,
)
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Group, Request, without_complete
from sidestep.engine_core.requests.request_record import make_record
from sidestep.engine_core.scheduling.outbox import Outboxes
from sidestep.engine_core.scheduling.policies.request_queue import RequestQueue
from sidestep.engine_core.scheduling.queue_wait import QueueWait
from sidestep.ipc.transport.messages import Finished, FinishReason
from sidestep.ipc.transport.records import RequestRecord

_REMEMBERED = 4096
"""Requests that have ended and that `request_records` still returns."""


class Roster:
    """All requests that have not ended, by the state of each."""

    def __init__(
        self,
        queue: RequestQueue,
        num_slots: int,
        kv: KVCacheManager,
        outboxes: Outboxes,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._outboxes = outboxes
        self._clock = clock
        self.requests: dict[tuple[int, int], Request] = {}
        """Requests that a frontend knows, by its number and their handles."""
        self.queue = queue
        self.compiling: dict[Request, None] = {}
        """Requests that wait for their grammar, outside of the queue: others pass them."""
        self.running: dict[Request, None] = {}
        """Running requests, the most important first, in the order of the policy."""
        self.leaving: dict[Request, None] = {}
        self.free_slots = list(range(num_slots))
        self.forking = ForkingGroups()
        self.num_preemptions = 0
        self.waits = QueueWait()
        self.ended: deque[RequestRecord] = deque(maxlen=_REMEMBERED)
        self._deadlines: list[tuple[float, int, int]] = []
        """Heap of (time, client, handle).

        It does not hold the request, whose tokens would stay in memory until the deadline.
        """

    def __repr__(self) -> str:
        return f"running={len(self.running)}, waiting={len(self.queue)}"

    # Waiting.

    def know(self, request: Request) -> None:
        """Register a new request, which its frontend may ask about from now on."""
        request.timing.queued_at(self._clock())
        self.requests[request.client, request.handle] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.client, request.handle))

    def join_queue(self, request: Request) -> None:
        """Put a request in the queue, if it and all that enter with it have their grammars."""
        if not self.awaits_grammar(request):
            self.elapse()
            self.queue.add(entering_with(request)[0])

    def awaits_grammar(self, request: Request) -> bool:
        """Return whether a request waits, outside of the queue, for a grammar.

        The grammar is its own, or that of a request that enters with it.
        """
        return (
            bool(self.compiling)
            and request.status is RequestStatus.WAITING
            and any(r in self.compiling for r in entering_with(request))
        )

    def take_compiled(self, compiled: Iterable[tuple[Request, str | None]]) -> None:
        """Queue the requests whose grammar is ready, and end the ones whose grammar has failed."""
        for request, problem in compiled:
            if request not in self.compiling:
                continue  # it has failed and was too late as well
            if problem is not None:
                self.fail(request, problem)
            else:
                del self.compiling[request]
                self.waits.waited("grammar", self._clock() - request.timing.queued)
                self.join_queue(request)

    def elapse(self) -> None:
        """Count how long the requests in the queue have waited. Call it before a change."""
        self.waits.elapse(self._clock(), len(self.queue))

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: in the queue, or waiting for their grammar."""
        outside = {entering_with(request)[0] for request in self.compiling}
        return sum(len(entering_with(request)) for request in chain(self.queue, outside))

    # Running.

    def seat(self, request: Request) -> None:
        """Give a request that has its blocks a slot; it runs from now on."""
        request.seat(heapq.heappop(self.free_slots))
        self.running[request] = None

    @property
    def num_taken_seats(self) -> int:
        """Running requests that still need a row.

        A request whose last token is in flight needs no row any more.
        """
        return len(without_complete(self.running))

    def num_blocks_coming_back(self) -> int:
        """Return the number of blocks that are free as soon as the steps in flight are back."""
        ending = (r for r in self.running if r.will_be_complete)
        blocks = [r.blocks for r in chain(self.leaving, ending)]
        held = Counter(block for one in blocks for block in one.all())
        reserved = sum(one.num_reserved for one in blocks)
        return reserved + sum(map(self._kv.pool.is_last, held.keys(), held.values()))

    def preempt(self, request: Request) -> None:
        """Take slot and blocks from a request and its whole group, to compute them again later.

        All blocks go: keeping some would leave several requests each with too few blocks to go on.
        """
        group = request.group
        # A choice whose last token is in flight ends by itself.
        together = (
            [request]
            if group is None
            else [
                r
                for r in group.members
                if r.status is RequestStatus.RUNNING and not r.will_be_complete
            ]
        )
        for one in together:
            del self.running[one]
            one.preempt()
            self.num_preemptions += 1
            self._leave(one)
        if group is not None:
            self.forking.stop(group)
            if group.queued is not None:  # other members wait already
                return
            group.queue(together[0])
        self.elapse()
        self.queue.put_back(together[0])

    # Ending.

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: str | None = None,
        field: str | None = None,
        stop_reason: int | str | None = None,
        completes_grammar: bool = False,
    ) -> None:
        """End a request in any state, and tell its frontend why."""
        word = Finished(
            handle=request.handle,
            reason=reason,
            error=error,
            field=field,
            stop_reason=stop_reason,
            num_preemptions=request.num_preemptions,
            completes_grammar=completes_grammar,
            beams=found_by(request),
            drafts=request.drafts.message() if request.max_drafts else None,
        )
        self.forget(request, reason)
        self._outboxes.of(request.client).finished.append(word)

    def fail(self, request: Request, problem: str) -> None:
        """End a request whose grammar cannot be followed."""
        field = None if request.grammar is None else request.grammar.field
        self.end(request, FinishReason.ERROR, error=problem, field=field)

    def forget(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request in any state, without telling its frontend."""
        del self.requests[request.client, request.handle]
        for one in ending_with(request):
            self._stop(one)
        self.ended.append(make_record(request, finished=self._clock(), reason=str(reason)))

    def expire(self) -> None:
        """End the requests whose deadline has come."""
        while (deadline := self.next_deadline()) is not None and deadline <= self._clock():
            request = self.requests[heapq.heappop(self._deadlines)[1:]]
            self.end(request, FinishReason.ABORT, stop_reason="deadline")

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of the requests that have not ended; None for none."""
        while self._deadlines and self._deadlines[0][1:] not in self.requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def release(self, request: Request) -> None:
        """Free a request's slot and blocks, which no step in flight touches any more."""
        del self.leaving[request]
        heapq.heappush(self.free_slots, request.slot)
        request.release()
        self._kv.free(request)

    def _stop(self, request: Request) -> None:
        """Take a request out of the state that it is in."""
        was_running, was_outside = (
            request.status is RequestStatus.RUNNING,
            self.awaits_grammar(request),
        )
        if was_running:
            del self.running[request]
        elif was_outside:
            self.compiling.pop(request, None)
        elif request.group is None or request is request.group.queued:
            self.elapse()
            self.queue.forget(request)
        request.finish()
        if request.group is not None:
            self._part(request, request.group, was_outside)
        if was_running:
            self._leave(request)

    def _part(self, request: Request, group: Group, was_outside: bool) -> None:
        """Take a request that has ended out of its group; the others go on without it.

        was_outside: it was outside of the queue, waiting for a grammar.
        """
        was_queued = request is group.queued
        group.part(request)
        if group.queued is not None:
            if was_outside:
                self.join_queue(group.queued)
            elif was_queued:
                self.queue.replace(request, group.queued)
        if not group.forks:
            self.forking.stop(group)
        elif request is group.source and request.num_computed < request.num_prompt:
            self.preempt(group.forks[0])  # no request computes their prompt now

    def _leave(self, request: Request) -> None:
        self.leaving[request] = None
        if request.num_in_flight == 0:
            self.release(request)
