"""Conditions that the scheduler's state meets between any two calls."""

from __future__ import annotations

from collections.abc import Iterable

from sidestep.engine_core.groups.group import check_groups
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.scheduling.roster import Roster
from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.ipc.step_limits import StepLimits


def check_invariants(
    roster: Roster, kv: KVCacheManager, plans: Iterable[StepPlan], limits: StepLimits
) -> None:
    """Raise AssertionError when the state contradicts itself. plans: of all steps in flight."""
    held = [*roster.running, *roster.leaving]
    slots = [r.slot for r in held]
    assert sorted(slots + roster.free_slots) == list(range(limits.num_slots)), (
        "slots leak or are shared"
    )
    assert roster.num_taken_seats <= limits.max_num_seqs
    assert len(roster.queue) == len(set(roster.queue)), "the queue's count is wrong"
    assert not set(roster.queue) & set(roster.compiling), (
        "a request without its grammar is in the queue"
    )
    in_flight = [r for plan in plans for r in plan.rows]
    for request in {*roster.requests.values(), *held}:
        assert request.num_in_flight == in_flight.count(request), f"{request}: steps in flight"
    for request in roster.running:
        assert request.status is RequestStatus.RUNNING
        if request.parked:  # it has no row before its blocks are complete
            continue
        held_blocks = request.blocks.end + bool(request.blocks.copy_sources)
        written = min(request.num_computed, request.max_total)
        assert written <= held_blocks * kv.block_size, f"{request}: too few blocks"
        assert len(request.token_ids) + request.num_sampling <= request.max_total, (
            f"{request}: too long"
        )
        assert request.num_sampling <= request.num_placeholders, f"{request}: placeholders"
    roster.forking.check_invariants()
    check_groups([*roster.requests.values(), *roster.running], roster.queue, roster.forking)
    for request in roster.leaving:
        assert request.num_in_flight > 0 and request.status is not RequestStatus.RUNNING
    kv.check_invariants(held)
