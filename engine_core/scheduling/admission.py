"""Admission of waiting requests, in the queue's order, to free seats, slots, blocks and tokens."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.engine_core.groups.group import entering_with, sharing
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.outbox import Outboxes
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.roster import Roster
from sidestep.engine_core.scheduling.step_plan import StepBuilder
from sidestep.ipc.transport.messages import Started
from sidestep.ipc.transport.records import WaitReason


class Admission:
    """Admits waiting requests, and says what the others wait for."""

    def __init__(
        self,
        roster: Roster,
        policy: Policy,
        kv: KVCacheManager,
        max_num_seqs: int,
        outboxes: Outboxes,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._policy = policy
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._outboxes = outboxes
        self._clock = clock

    def __repr__(self) -> str:
        return f"Admission({self._roster!r})"

    def admit(self, step: StepBuilder, budget: int, seats: int) -> WaitReason:
        """Give rows to waiting requests while there is room; return what the next one waits for."""
        roster = self._roster
        reason: WaitReason | None = None
        while budget and seats and roster.free_slots:
            request = roster.queue.peek()
            if request is None:
                break
            together = entering_with(request)
            # A preempted request's tokens in flight come back before it can be sent again.
            if any(r.num_in_flight for r in together):
                reason = "output"
                break
            if len(together) > min(seats, len(roster.free_slots)):
                reason = "max_num_seqs"
                break
            others = sharing(together)
            idle = [r for r in together[1:] if r not in others]
            if not self._kv.enter(request, *others, idle=idle):
                reason = "kv_cache"
                break
            roster.queue.pop()
            for one in together:
                roster.seat(one)
                if not one.was_started:
                    self._tell_started(one, request.num_computed)
            if request.group is not None:
                roster.forking.enter(request.group, together)
            count = min(len(request.token_ids) - request.num_computed, budget)
            blocks = self._kv.grow(request, request.num_computed + count)
            assert blocks == [], "the blocks of its tokens were neither taken nor reserved"
            step.enter(request, count)
            self._policy.charge([(request, count)])
            seats -= len(together)
            budget -= count
            self._kv.remember(request)
        roster.running = self._policy.ranked(roster.running)
        return reason or (
            "max_num_batched_tokens" if seats and roster.free_slots else "max_num_seqs"
        )

    def waits_for(self, request: Request) -> WaitReason | None:
        """Return what a request waits for, as RequestRecord.waiting_for has it; None if it runs."""
        roster = self._roster
        if request.status is RequestStatus.RUNNING:
            return None
        if roster.awaits_grammar(request):
            return "grammar"
        together = entering_with(request)
        if together[0] is not roster.queue.peek():
            return "turn"
        if any(r.num_in_flight for r in together):
            return "output"
        if len(together) > min(self._max_num_seqs - roster.num_taken_seats, len(roster.free_slots)):
            return "max_num_seqs"
        if self._kv.num_blocks_to_enter(together[0], *sharing(together)) > self._kv.pool.num_free:
            return "kv_cache"
        return "max_num_batched_tokens"

    def _tell_started(self, request: Request, num_cached: int) -> None:
        now = self._clock()
        request.started(num_cached, now)
        self._outboxes.of(request.client).started.append(
            Started(handle=request.handle, num_cached_tokens=num_cached, scheduled=now)
        )
