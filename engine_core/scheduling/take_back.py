"""The take-back of all steps in flight, when a step has failed and the workers' tables are empty.

Order of side effects: first the counts of each request become those of before its lost rows, then
the prefix cache forgets the blocks that these rows were to write, then slots and blocks go back.
Tokens that have come stay. So every request enters again and is computed from its known tokens.
"""

from __future__ import annotations

from collections import deque

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.scheduling.roster import Roster
from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.executor.base import StepFailed
from sidestep.ipc.transport.messages import FinishReason


def take_back(
    plans: deque[StepPlan], roster: Roster, kv: KVCacheManager, failed: StepFailed
) -> None:
    """Take back the steps of `plans`, all that are in flight, and empty it.

    Running requests wait again, as after a preemption. The oldest step has failed. If that names a
    row, its request ends with an error.
    """
    assert plans[0].step_id == failed.step_id, "a step has failed that is not the oldest"
    culprit = next((request for request in plans[0].rows if request.slot == failed.slot), None)
    # 1. The rows count no longer.
    touched = dict[Request, None]()
    for plan in plans:
        sampling = set(plan.sampling)
        for request, num_tokens in zip(plan.rows, plan.num_row_tokens, strict=True):
            if request in plan.late:  # its sample, and the token for it, have been taken back
                request.take_back_row(num_tokens - 1, 0, samples=False)
            else:
                drafts = plan.drafts_of(request)
                request.take_back_row(num_tokens, drafts, samples=request in sampling)
            touched[request] = None
    plans.clear()
    # 2. Blocks were made known on the promise of these rows.
    for request in touched:
        kv.forget_behind(request)
    # 3. The most important request is the last to be put back, at the head of the queue.
    for request in reversed(list(roster.running)):
        if request.status is RequestStatus.RUNNING:  # not preempted with its group already
            roster.preempt(request)
    for request in list(roster.leaving):
        roster.release(request)
    if culprit is not None:
        _end(culprit, roster, f"the engine cannot compute this request: {failed.line}")


def _end(request: Request, roster: Roster, problem: str) -> None:
    """End a request with an error, unless it has ended. A search ends as a whole."""
    if request.group is not None and request.group.chooses_tokens and request.group.members:
        request = request.group.members[0]
    if request.status is not RequestStatus.FINISHED:
        roster.end(request, FinishReason.ERROR, error=problem)
