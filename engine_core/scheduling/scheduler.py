"""The scheduler: decides what runs in each step.

There is no prefill phase and no decode phase: each step gives each request a number of tokens to
compute. A request in decode gets one, and chunks of prompts get the rest of the token budget.
`schedule()` decides and returns the step; `update()` takes its output. With overlap, `update` is
called one step later: a token that is not back yet counts as a placeholder. The scheduler is
synchronous and has no sockets; its clock is injected.

Steps enter a pipeline in beats. The number of steps in flight is the number of stages, and one more
with overlap. A beat in which no request is due is left out (micro_batches.py).

`schedule()` returns None only if nothing is left to run, or if a step in flight must come back
first: the caller may sleep until then.

Its parts: the order of requests (policies/), the state of each request (roster.py), admission
(admission.py), preemption (preemption.py), the effects of an output (step_results.py). This file
calls them in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from sidestep.engine_core.groups.beams import make_beams
from sidestep.engine_core.groups.group import make_choices, why_never
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.mask_job import FOREVER
from sidestep.engine_core.requests.request import Request, grammars_of, without_complete
from sidestep.engine_core.requests.request_record import make_record
from sidestep.engine_core.scheduling.admission import Admission
from sidestep.engine_core.scheduling.draft_budget import DraftBudget
from sidestep.engine_core.scheduling.flight_recorder import Situation
from sidestep.engine_core.scheduling.invariants import check_invariants
from sidestep.engine_core.scheduling.micro_batches import pick_due, share_prompts
from sidestep.engine_core.scheduling.outbox import Outboxes
from sidestep.engine_core.scheduling.policies.policy import Policy
from sidestep.engine_core.scheduling.preemption import Room
from sidestep.engine_core.scheduling.prompt_budget import PromptBudget, TokenBudget
from sidestep.engine_core.scheduling.roster import Roster
from sidestep.engine_core.scheduling.step_plan import StepBuilder, StepPlan
from sidestep.engine_core.scheduling.step_results import StepResults
from sidestep.engine_core.scheduling.take_back import take_back
from sidestep.engine_core.structured_outputs.draft_masks import forced_tokens
from sidestep.engine_core.structured_outputs.grammar_costs import share_masks
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.engine_core.structured_outputs.mask_table import MaskTable
from sidestep.executor.base import StepFailed
from sidestep.ipc.common.registry import POLICIES, load
from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.messages import AddRequest, Finished, FinishReason, Outputs
from sidestep.ipc.transport.records import RequestRecord
from sidestep.ipc.transport.step import Int32, StepInput, StepMasks, StepOutput

_NO_BLOCKS: list[int] = []
_PATIENCE_S = 0.5e-3
"""Seconds, at least, that a step waits for all of its masks.

It waits longer where half the time of a step without prompts is longer.
"""
_LATE_SHARE = 4
"""After that wait, masks of one row may be late, or of one row in this many rows.

So a mask that takes long costs its own request a turn, and not every request.
"""
_LONGEST_S = 20e-3
"""Seconds after which a step waits for no mask."""
_LONGEST_SHARE = 8
"""A step waits for masks longer than `_LONGEST_S` if a step's time divided by this is longer.

The time of a step contains that wait, so the share is small.
"""


class Scheduler:
    """Decides what each step runs, and keeps every request's state."""

    def __init__(
        self,
        config: SchedulerConfig,
        limits: StepLimits,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        grammars: Grammars,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._limits = limits
        self.kv = kv
        # One request alone can always run to its end, so no admitted request can get stuck.
        self._max_model_len = min(max_model_len, kv.longest)
        self._eos = frozenset(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self._outboxes = Outboxes()
        self._policy: Policy = load(POLICIES[config.scheduling_policy])()
        self._roster = Roster(self._policy.queue, limits.num_slots, kv, self._outboxes, clock)
        self._requests = self._roster.requests
        self._room = Room(self._roster, self._policy, kv, limits.max_num_seqs)
        self._admission = Admission(
            self._roster, self._policy, kv, limits.max_num_seqs, self._outboxes, clock
        )
        self._results = StepResults(self._roster, self._policy, kv, grammars, self._outboxes, clock)
        self._prompt_budget = PromptBudget(limits.target_itl_s, limits.max_num_batched_tokens)
        self._tokens = TokenBudget(limits.max_num_batched_tokens, limits.max_num_seqs, clock)
        self._drafts = DraftBudget(config.speculation)
        self._plans: deque[StepPlan] = deque()
        """Plans of the steps in flight, the oldest first."""
        self._followed: StepPlan | None = None
        """A step whose tokens only the grammars have taken so far."""
        self._next_step = self._next_beat = 0
        self._masks = MaskTable(limits.num_masks)
        self._last_masked = -1
        """The last step whose masks were taken."""
        self._num_postponed = 0
        """Tokens that were sampled a step late, because their mask was late."""

    def __repr__(self) -> str:
        return f"Scheduler({self._roster!r}, in_flight={len(self._plans)}, {self.kv!r})"

    # Requests of frontends.

    def add(self, message: AddRequest) -> None:
        """Take a request with all its choices. End it at once if it can never run."""
        if message.beam_search is None:
            requests, field = (
                make_choices(
                    message, self._max_model_len, self._eos, self.kv, self._limits.num_drafts
                ),
                "n",
            )
        else:
            requests, field = (
                make_beams(message, message.beam_search, self._max_model_len, self._eos, self.kv),
                "beam_width",
            )
        told = requests if message.beam_search is None else requests[:1]
        problem = why_never(requests, self._max_model_len, self._limits.max_num_seqs, field)
        if problem is not None:
            self._refuse(told, problem)
            return
        if message.grammar is not None:
            account = self.grammars.open_account()
            for request in requests:
                if (problem := self.grammars.start(request, message.grammar, account)) is not None:
                    self._refuse(told, problem, message.grammar.field)
                    return
            self._roster.compiling |= dict.fromkeys(r for r in requests if r.lacks_matcher)
        for request in told:
            self._roster.know(request)
        self._roster.join_queue(requests[0])

    def _refuse(self, requests: Iterable[Request], problem: str, field: str | None = None) -> None:
        """End requests that have not been taken, with an error."""
        for request in requests:
            request.finish()
            self._outboxes.of(request.client).finished.append(
                Finished(
                    handle=request.handle, reason=FinishReason.ERROR, error=problem, field=field
                )
            )

    def knows(self, client: int, handles: Iterable[int]) -> bool:
        """Return whether a frontend has a request with one of these handles that has not ended."""
        return any((client, handle) in self._requests for handle in handles)

    def refuse(self, client: int, handles: Iterable[int], problem: str) -> None:
        """End a frontend's request that cannot be taken, with an error. It may be taken in part."""
        for handle in handles:
            if (request := self._requests.get((client, handle))) is not None:
                self._roster.end(request, FinishReason.ERROR, error=problem)
            else:
                self._outboxes.of(client).finished.append(
                    Finished(handle=handle, reason=FinishReason.ERROR, error=problem)
                )

    def abort(self, client: int, handles: Iterable[int]) -> None:
        """End requests without telling the frontend, which asked for it itself.

        Unknown handles are skipped: their requests have ended already.
        """
        for handle in handles:
            request = self._requests.get((client, handle))
            if request is not None:
                self._roster.forget(request)

    def abort_client(self, client: int) -> None:
        """End all requests of a frontend."""
        self.abort(client, [handle for owner, handle in self._requests if owner == client])

    # The step.

    def schedule(self) -> StepInput | None:
        """Return the next step, or None when nothing can run now."""
        roster = self._roster
        roster.expire()
        roster.take_compiled(self.grammars.take_compiled())
        if roster.queue:
            roster.elapse()
        # A step may be at most max_steps_in_flight beats after the oldest in flight. With nothing
        # in flight, the first stage knows all tokens within one round of beats.
        limits = self._limits
        end = (
            self._plans[0].beat + limits.max_steps_in_flight
            if self._plans
            else self._next_beat + limits.num_stages
        )
        for beat in range(self._next_beat, end):
            step = StepBuilder(self._next_step, self.kv, beat, limits.num_stages)
            self._fill(step, beat)
            if not step.is_empty:
                return self._launch(step, beat)
        return None

    def _fill(self, step: StepBuilder, beat: int) -> None:
        """Add a row for each request that can have one."""
        roster = self._roster
        self._room.begin_step()
        # 1. A waiting request preempts running ones, if the policy lets it.
        self._room.yield_to_urgent()
        # 2. Running requests get one token each, or a chunk of prompt, most important first.
        num_preemptions = roster.num_preemptions
        budget, prompts, seats = self._schedule_running(step, beat)
        self._policy.charge(step.rows())
        # 3. Waiting requests enter, unless 2 preempted a request: what is free now is kept for it.
        if roster.queue:
            roster.waits.reason = (
                self._admission.admit(step, min(budget, prompts), seats)
                if roster.num_preemptions == num_preemptions
                else "kv_cache"
            )
        # 4. Rows that decode verify drafts, if the step has no prompt.
        if self._limits.num_drafts and not step.is_empty and step.can_have_drafts:
            self._add_drafts(step)

    def _add_drafts(self, step: StepBuilder) -> None:
        """Let the rows of a step verify as many drafts as pay, if tokens and blocks allow."""
        most = self._tokens.now // step.num_rows - 1
        if (num_drafts := self._drafts.choose(step.num_rows, most)) > 0:
            step.add_drafts(num_drafts)

    def _launch(self, step: StepBuilder, beat: int) -> StepInput:
        """Build the step's message, and keep its plan until the output comes."""
        self._roster.forking.share_windows(self.kv)
        message, plan = step.build()
        self.kv.pool.free(step.copied)
        self._plans.append(plan)
        self._next_step += 1
        self._next_beat = beat + 1
        return message

    def _schedule_running(self, step: StepBuilder, beat: int) -> tuple[int, int, int]:
        """Add rows for running requests, and return what is left for waiting ones.

        The result has the rest of the token budget, how much of it prompts may have, and how many
        more requests may enter.
        """
        budget, block_size = self._tokens.tokens(), self.kv.block_size
        self._roster.forking.unpark(self.kv)
        # A request whose last token is in flight needs no row, so its seat is free already.
        live = without_complete(self._roster.running)
        due, waiting = pick_due(live, beat, self._limits.num_stages), self._roster.queue.num_tokens
        decodes = any(r.num_to_compute == 1 for r in due)
        prompts = self._prompt_budget.tokens(len(due) if decodes else 0, waiting)
        prompts = share_prompts(prompts, live, waiting, self._limits.num_stages)
        left_out = share_masks(due, self._longest_s * self.grammars.num_workers)
        later = len(due)
        for request in due:
            later -= 1
            if (
                request.status is not RequestStatus.RUNNING
                or request.parked
                or (left_out and request in left_out)
            ):
                # It was preempted while this loop made room for another, or it is parked, or its
                # mask takes too long for this step.
                continue
            count = request.num_to_compute
            # Drafts in flight may end it: a row would then lie behind its last token.
            if request.num_computed + count >= request.max_total:
                continue
            # One token is kept for each request after this one: prompts never starve decodes.
            if count > 1:
                count = min(count, budget - later, prompts)
            if count <= 0:
                continue
            blocks: list[int] | None = _NO_BLOCKS
            if request.num_computed + count > request.blocks.end * block_size:
                blocks = self._room.grow(request, request.num_computed + count)
            if blocks is None:
                continue
            if request.is_new:
                step.enter(request, count)
            else:
                step.add(request, count, blocks)
            budget -= count
            if count > 1:
                prompts -= count
                self.kv.remember(request)
        return budget, max(0, prompts), self._limits.max_num_seqs - len(live)

    def follow(self, output: StepOutput) -> StepPlan:
        """Give the oldest step's tokens to the grammars of their requests, and return its plan.

        After that `take_masks` knows what the next step waits for. `update` must come next.
        """
        plan = self._followed = self._plans.popleft()
        assert plan.step_id == output.step_id, (
            f"output of step {output.step_id} came for step {plan.step_id}"
        )
        if plan.masked:
            self._results.follow_grammars(plan, output)
        return plan

    def update(self, output: StepOutput) -> dict[int, Outputs]:
        """Take the oldest step's tokens, and return the messages for the frontends, by client."""
        plan = self._followed or self.follow(output)
        self._followed = None
        self._prompt_budget.learn(
            plan.num_tokens - len(plan.rows), (output.end_ns - output.start_ns) / 1e9
        )
        self._drafts.learn(plan, output)
        self._results.take(plan, output)
        return self.take_outputs()

    def take_back(self, failed: StepFailed) -> int:
        """Take back all steps in flight, of which the oldest has failed: their requests run again.

        A request whose row is named ends with an error. Return the number of the next step.
        """
        take_back(self._plans, self._roster, self.kv, failed)
        self._masks.clear()
        if failed.cause == "oom":
            self._tokens.halve()
        return self._next_step

    def take_outputs(self) -> dict[int, Outputs]:
        """Return the messages that frontends must get by now, by client."""
        self._roster.expire()
        return self._outboxes.take()

    def take_masks(self) -> StepMasks | None:
        """Return the masks of the newest step in flight, if it waits for them and has not got them.

        Call it before the next `schedule`. All that the masks depend on has come back when the
        steps have come back whose tokens are the inputs of the newest.
        """
        plan = self._plans[-1] if self._plans else None
        if (
            plan is None
            or not plan.masked
            or plan.step_id == self._last_masked
            or self._plans[0].beat <= plan.beat - self._limits.num_stages
        ):
            return None
        self._last_masked = plan.step_id
        # The token of a request that has ended in the meantime is dropped, whatever it is.
        requests = [
            request for _, request in plan.masked if request.status is not RequestStatus.FINISHED
        ]
        masks = self._masks_in_time(plan, requests)
        rows = [row for row, request in plan.masked if request in masks]
        there = [request for _, request in plan.masked if request in masks]
        found, most = [masks[request] for request in there], self._limits.num_drafts
        states = grammars_of(there)
        if not most:
            return self._masks.message(plan.step_id, rows, states, found)
        behind = self.grammars.masks_behind_drafts(states, list(map(plan.drafts_of, there)))
        # The step may accept all of its drafts, and the next one has as many again.
        forced = forced_tokens(states, found, 2 * most + 1)
        return self._masks.message(plan.step_id, rows, states, found, behind, forced)

    def _masks_in_time(self, plan: StepPlan, requests: Sequence[Request]) -> dict[Request, Int32]:
        """Return the masks of the newest step that are in time; other requests do not sample."""
        most_late, longest_s = (
            max(len(plan.rows) // _LATE_SHARE, min(1, len(plan.rows) - 1)),
            self._longest_s,
        )
        # Later stages' steps have been planned with all rows. A recurrent layer's state has taken
        # the token in, and cannot take it again.
        if self._limits.num_stages > 1 or self.kv.states is not None:
            most_late, longest_s = 0, FOREVER
        found = self.grammars.masks(requests, most_late, self._patience_s, longest_s)
        masks = {
            request: mask for request, mask in zip(requests, found, strict=True) if mask is not None
        }
        for request in requests:
            if request not in masks:
                self._postpone(plan, request)
            elif (problem := self.grammars.charge(request)) is not None:
                self._roster.fail(request, problem)
        return masks

    @property
    def _patience_s(self) -> float:
        """Seconds that a step waits for all of its masks."""
        return min(max(_PATIENCE_S, self._prompt_budget.decode_s / 2), self._longest_s)

    @property
    def _longest_s(self) -> float:
        """Seconds that a step waits for any mask."""
        return max(_LONGEST_S, self._prompt_budget.decode_s / _LONGEST_SHARE)

    def _postpone(self, plan: StepPlan, request: Request) -> None:
        """Take a request's sample out of the newest step."""
        request.postpone_sample(plan.drafts_of(request))
        plan.late.add(request)
        self._num_postponed += 1

    # State.

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs, waits, or still holds a slot or blocks."""
        return bool(self._requests or self._roster.leaving)

    def next_deadline(self) -> float | None:
        """Return the latest time of the next turn, on the scheduler's clock; None for no limit."""
        own, compiling = self._roster.next_deadline(), self.grammars.next_deadline()
        return min(
            (deadline for deadline in (own, compiling) if deadline is not None), default=None
        )

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: in the queue, or waiting for their grammar."""
        return self._roster.num_waiting

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Requests that run keep their blocks."""
        self.kv.reset_prefix_cache([*self._roster.running, *self._roster.leaving])
        return True

    def stats(self) -> dict[str, float]:
        """Return counts for users and metrics. Prefix-cache counts are in tokens."""
        return {
            "num_running": len(self._roster.running),
            "num_waiting": self.num_waiting,
            "num_steps": self._next_step,
            "num_preemptions": self._roster.num_preemptions,
            "num_postponed_tokens": self._num_postponed,
            "max_step_tokens": self._tokens.now,
            "kv_cache_usage": self.kv.usage,
            "kv_cache_cached_blocks": self.kv.pool.num_cached,
            "prefix_cache_queries": self.kv.num_queried_tokens,
            "prefix_cache_hits": self.kv.num_hit_tokens,
            **self._roster.waits.stats(),
            **self._drafts.stats(),
        }

    def situation(self) -> Situation:
        """Return the sizes of the step just scheduled, for the flight recorder."""
        plan, roster = self._plans[-1], self._roster
        return Situation(
            len(plan.rows),
            plan.num_tokens,
            plan.num_entered,
            plan.num_prompts,
            len(roster.running),
            len(roster.queue) + len(roster.compiling),
            self.kv.pool.num_free,
        )

    def request_records(self, limit: int | None = None) -> list[RequestRecord]:
        """Return the records of the last requests that ended, oldest first, then of all others.

        limit: the most records of each kind: ended, running and waiting requests. The next request
        to enter is among the waiting ones.
        """
        roster = self._roster
        if limit is None:
            return [*roster.ended, *map(self._record, self._requests.values())]
        ended = islice(reversed(roster.ended), limit)
        return [
            *reversed(list(ended)),
            *map(self._record, islice(roster.running, limit)),
            *map(self._record, self._first_waiting(limit)),
        ]

    def _first_waiting(self, limit: int) -> Iterable[Request]:
        head = self._roster.queue.peek()
        others = (r for r in self._roster.queue if r is not head)
        return islice(chain(() if head is None else (head,), others, self._roster.compiling), limit)

    def _record(self, request: Request) -> RequestRecord:
        return make_record(request, waiting_for=self._admission.waits_for(request))

    def check_invariants(self) -> None:
        """Raise AssertionError when the state contradicts itself."""
        check_invariants(self._roster, self.kv, self._plans, self._limits)
