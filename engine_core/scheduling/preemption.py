"""Preemption: which requests lose their slot when blocks or seats are short.

A running request that needs a block takes it from the least important running request. A waiting
request preempts the running ones that the policy names. Blocks that steps in flight will give back
anyway are waited for instead, and only one request counts on each of them.
"""

from __future__ import annotations

from itertools import chain

from sidestep.engine_core.groups.group import entering_with, sharing
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.roster import Roster


class Room:
    """Makes room for requests, by preemption if need be."""

    def __init__(
        self, roster: Roster, policy: Policy, kv: KVCacheManager, max_num_seqs: int
    ) -> None:
        self._roster = roster
        self._policy = policy
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._num_coming: int | None = None
        """Blocks that steps in flight will give back and that no request of this step counts on.

        None until it is needed.
        """

    def __repr__(self) -> str:
        return f"Room({self._kv!r})"

    def begin_step(self) -> None:
        """Begin a step, in which no request counts on any block yet."""
        self._num_coming = None

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Return new blocks for a running request, preempting less important ones if need be.

        Return None if the request gets no row in this step.
        """
        roster = self._roster
        while (blocks := self._kv.grow(request, num_tokens)) is None:
            wanted = self._kv.num_missing(request, num_tokens)
            if self._num_coming is None:
                self._num_coming = roster.num_blocks_coming_back()
            if wanted <= self._num_coming:
                self._num_coming -= wanted
                return None
            victims = self._policy.victims(roster.running)
            victim = next(r for r in victims if not r.will_be_complete)
            coming = roster.num_blocks_coming_back()
            roster.preempt(victim)
            if request.status is not RequestStatus.RUNNING:
                return None
            self._num_coming += roster.num_blocks_coming_back() - coming
        return blocks

    def yield_to_urgent(self) -> None:
        """Preempt as many requests as an urgent one needs, of those that it may preempt.

        Preempt none, if all of them were too few.
        """
        roster = self._roster
        urgent = self._policy.urgent()
        if urgent is None:
            return
        candidates = self._policy.victims(roster.running, urgent)
        first = next(candidates, None)
        if first is None:
            return
        together = entering_with(urgent)
        seats = self._max_num_seqs - roster.num_taken_seats - len(together)
        wanted = self._kv.num_blocks_to_enter(together[0], *sharing(together))
        room = self._kv.pool.num_free + roster.num_blocks_coming_back() - wanted
        victims: list[Request] = []
        for request in chain((first,), candidates):
            if seats >= 0 and room >= 0:
                break
            if not request.will_be_complete:
                victims.append(request)
                seats += 1
                room += request.blocks.count
        if seats >= 0 and room >= 0:
            for victim in victims:
                if victim.status is RequestStatus.RUNNING:  # not preempted with its group already
                    roster.preempt(victim)
