"""What runs in each step.

There is no prefill phase and no decode phase: each step gives each request a number of tokens to compute, one to those
that decode, the rest of the token budget to chunks of prompts. `schedule()` decides and returns the step; `update()`
takes its output. With overlap the second is called one step later than the first: a token that is not back yet counts
as a placeholder. Synchronous, without sockets; the clock is given.

`schedule()` returns None only if nothing is left to run, or if a step in flight must come back first: whoever drives it
may sleep until then.

Order of side effects: slots and blocks of a request that has ended, or was preempted, are given back when the last step
that touches them has come back, never before (`_release`).
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain, islice

import numpy as np

from sidestep.engine_core.beam_search import Candidates
from sidestep.engine_core.beams import BeamGroup, candidates_of_beams, found_by, make_beams
from sidestep.engine_core.flight_recorder import Situation
from sidestep.engine_core.group import (
    ForkingGroups,
    Group,
    check_groups,
    entering_with,
    make_choices,
    sharing,
    why_never,
)
from sidestep.engine_core.kv_cache_manager import KVCacheManager
from sidestep.engine_core.logprobs import share_logprobs
from sidestep.engine_core.outbox import Outboxes
from sidestep.engine_core.prompt_budget import PromptBudget
from sidestep.engine_core.queue_wait import QueueWait
from sidestep.engine_core.request import Request, Status, make_record
from sidestep.engine_core.request_queue import QUEUES
from sidestep.engine_core.step_plan import StepBuilder, StepPlan
from sidestep.engine_core.structured_outputs import Grammars, problem_of
from sidestep.ipc.config import SchedulerConfig, StepLimits
from sidestep.ipc.messages import AddRequest, Finished, FinishReason, Outputs, Started
from sidestep.ipc.records import RequestRecord, WaitReason
from sidestep.ipc.step import StepInput, StepMasks, StepOutput

_NO_BLOCKS: list[int] = []
_REMEMBERED = 4096
"""Requests that have ended and are still known to `request_records`."""


class Scheduler:
    """Decides what each step runs, and keeps every request's state."""

    def __init__(self, config: SchedulerConfig, limits: StepLimits, kv: KVCacheManager, *, max_model_len: int,
                 eos_token_ids: Iterable[int], grammars: Grammars, clock: Callable[[], float]) -> None:
        self._config = config
        self._limits = limits
        self.kv = kv
        # A request alone can always run to its end: so nothing that was admitted can get stuck.
        self._max_model_len = min(max_model_len, kv.pool.num_blocks * kv.block_size)
        self._eos = frozenset(eos_token_ids)
        self.grammars = grammars
        self._clock = clock
        self._requests: dict[tuple[int, int], Request] = {}
        self._queue = QUEUES[config.scheduling_policy]()
        self._running: dict[Request, None] = {}
        """Most important first: in the order of admission, or of priority."""
        self._compiling: dict[Request, None] = {}
        """Those that wait for their grammar, outside of the queue: others pass them."""
        self._leaving: dict[Request, None] = {}
        """Ended or preempted, but steps in flight still touch them."""
        self._free_slots = list(range(limits.num_slots))
        self._prompt_budget = PromptBudget(limits.target_itl_s, limits.max_num_batched_tokens)
        self._plans: deque[StepPlan] = deque()
        self._next_step = 0
        self._last_masked = -1
        """The last step whose masks were taken."""
        self._outboxes = Outboxes()
        self._deadlines: list[tuple[float, int, int]] = []
        """Time, client, handle; not the request, whose tokens would be kept until then."""
        self._forking = ForkingGroups()
        self._copied: list[int] = []
        """Blocks held until the step that copies them has been put together."""
        self._num_coming: int | None = None
        """Blocks that steps in flight will give back and that nobody in this step counts on; None until asked for."""
        self._num_preemptions = 0
        self._waits = QueueWait()
        self._ended: deque[RequestRecord] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return (f"Scheduler(running={len(self._running)}, waiting={len(self._queue)}, "
                f"in_flight={len(self._plans)}, {self.kv!r})")

    # What frontends ask for.

    def add(self, message: AddRequest) -> None:
        """Takes a request with all its choices; one that can never run is ended at once."""
        if message.beam_search is None:
            requests, field = make_choices(message, self._max_model_len, self._eos, self.kv), "n"
        else:
            requests, field = make_beams(
                message, message.beam_search, self._max_model_len, self._eos, self.kv), "beam_width"
        told = requests if message.beam_search is None else requests[:1]
        problem = why_never(requests, self._max_model_len, self._limits.max_num_seqs, field)
        if problem is not None:
            self._refuse(told, problem)
            return
        if message.grammar is not None:
            for request in requests:
                if (problem := self.grammars.start(request, message.grammar)) is not None:
                    self._refuse(told, problem, request.grammar_field)
                    return
            self._compiling |= dict.fromkeys(r for r in requests if r.matcher is None)
        for request in told:
            request.queued = self._clock()
            self._requests[request.client, request.handle] = request
            if request.deadline is not None:
                heapq.heappush(self._deadlines, (request.deadline, request.client, request.handle))
        if requests[0].group is not None:
            requests[0].group.queued = requests[0]
        self._join_queue(requests[0])

    def _refuse(self, requests: Iterable[Request], problem: str, field: str | None = None) -> None:
        """Ends requests that have not been taken."""
        for request in requests:
            request.status = Status.FINISHED
            self._outboxes.of(request.client).finished.append(
                Finished(handle=request.handle, reason=FinishReason.ERROR, error=problem, field=field))

    def _join_queue(self, request: Request) -> None:
        """If it and all that enter with it have their grammars."""
        if not self._awaits_grammar(request):
            self._waits.elapse(self._clock(), len(self._queue))
            self._queue.add(entering_with(request)[0])

    def _awaits_grammar(self, request: Request) -> bool:
        """Whether it waits, outside of the queue, for its grammar or that of one that enters with it."""
        return bool(self._compiling) and request.status is Status.WAITING \
            and any(r in self._compiling for r in entering_with(request))

    def abort(self, client: int, handles: Iterable[int]) -> None:
        """Ends requests; says nothing of it, since the one who asked knows. Unknown handles have ended already."""
        for handle in handles:
            request = self._requests.get((client, handle))
            if request is not None:
                self._end(request)

    def abort_client(self, client: int) -> None:
        """Ends all requests of a frontend."""
        self.abort(client, [handle for owner, handle in self._requests if owner == client])

    # The step.

    def schedule(self) -> StepInput | None:
        """The next step, or None when nothing can run now."""
        self._expire()
        self._take_compiled()
        if self._queue:
            self._waits.elapse(self._clock(), len(self._queue))
        step = StepBuilder(self._next_step)
        self._num_coming = None
        # 1. A more urgent request that waits takes the place of the least important that run.
        if self._config.scheduling_policy == "priority":
            self._yield_to_urgent()
        # 2. Those that run, most important first: one token each, or a chunk of prompt.
        num_preemptions = self._num_preemptions
        budget, prompts, seats = self._schedule_running(step)
        # 3. Those that wait, unless somebody in 2 had to give way: what is free now is his.
        if self._queue:
            self._waits.reason = self._admit(step, min(budget, prompts), seats) \
                if self._num_preemptions == num_preemptions else "kv_cache"
        if step.is_empty:
            return None
        # 4. Remember what is in flight.
        message, plan = step.build()
        self.kv.pool.free(self._copied)
        self._copied.clear()
        self._plans.append(plan)
        self._next_step += 1
        return message

    def update(self, output: StepOutput) -> dict[int, Outputs]:
        """Takes the oldest step's tokens; returns what each frontend must be told."""
        plan = self._plans.popleft()
        assert plan.step_id == output.step_id, f"output of step {output.step_id} came for step {plan.step_id}"
        self._prompt_budget.learn(plan.num_tokens - len(plan.rows), (output.end_ns - output.start_ns) / 1e9)
        block_size = self.kv.block_size
        tokens = output.token_ids.tolist()
        if plan.masked:
            self._follow_grammars(plan, tokens)
        for client, told in share_logprobs(output.logprobs, plan.sampling):
            self._outboxes.of(client).logprobs = told
        for client, told in share_logprobs(output.prompt_logprobs, plan.rows):
            self._outboxes.of(client).prompt_logprobs = told
        candidates = candidates_of_beams(output.logprobs, plan.sampling) if len(output.logprobs) else {}
        # 1. Tokens take the place of placeholders. Those of requests that have ended are dropped.
        for request, token in zip(plan.sampling, tokens, strict=True):
            request.num_placeholders -= 1
            if request.status is Status.FINISHED:
                continue
            if candidates and isinstance(request.group, BeamGroup):
                self._take_candidates(request, request.group, candidates[request])
                continue
            outbox = self._outboxes.of(request.client)
            outbox.handles.append(request.handle)
            outbox.tokens.append(token)
            if request.first_token is None:
                request.first_token = self._clock()
            finish = request.finish_of(token)
            # 2. A block that has become full can be shared from now on.
            if min(request.num_computed, len(request.token_ids)) // block_size > request.num_registered \
                    and request.status is Status.RUNNING:
                self.kv.remember(request)
            if finish is not None:
                self._end(request, Finished(handle=request.handle, reason=finish[0], stop_reason=finish[1],
                                            num_preemptions=request.num_preemptions,
                                            completes_grammar=finish[0] is FinishReason.STOP
                                            and token not in request.stop_ids))
        # 3. Slots and blocks that no step in flight touches any more go back.
        for request in plan.rows:
            request.num_in_flight -= 1
            if request.num_in_flight == 0 and request.status is not Status.RUNNING:
                self._release(request)
        return self.take_outputs()

    def take_outputs(self) -> dict[int, Outputs]:
        """What frontends must be told by now, by client."""
        self._expire()
        return self._outboxes.take()

    def take_masks(self) -> StepMasks | None:
        """What the oldest step in flight may sample, if it waits for that: once, and before the next `schedule`."""
        plan = self._plans[0] if self._plans else None
        if plan is None or not plan.masked or plan.step_id == self._last_masked:
            return None
        self._last_masked = plan.step_id
        # The token of a request that has ended in the meantime is dropped, whatever it is.
        rows = [(row, request) for row, request in plan.masked if request.status is not Status.FINISHED]
        return StepMasks(plan.step_id, np.array([row for row, _ in rows], np.int32),
                         self.grammars.masks([request for _, request in rows]))

    # Questions.

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs, waits, or still holds what it had."""
        return bool(self._requests or self._leaving)

    def next_deadline(self) -> float | None:
        """When a turn must be taken at the latest, on the given clock."""
        own, compiling = self._next_own_deadline(), self.grammars.next_deadline()
        return min((deadline for deadline in (own, compiling) if deadline is not None), default=None)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run: in the queue, or waiting for their grammar."""
        outside = {entering_with(request)[0] for request in self._compiling}
        return sum(len(entering_with(request)) for request in chain(self._queue, outside))

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; requests that run keep their blocks."""
        self.kv.reset_prefix_cache([*self._running, *self._leaving])
        return True

    def stats(self) -> dict[str, float]:
        """Counts for people and metrics. Prefix-cache counts are in tokens."""
        return {
            "num_running": len(self._running), "num_waiting": self.num_waiting, "num_steps": self._next_step,
            "num_preemptions": self._num_preemptions, "kv_cache_usage": self.kv.usage,
            "kv_cache_cached_blocks": self.kv.pool.num_cached, "prefix_cache_queries": self.kv.num_queried_tokens,
            "prefix_cache_hits": self.kv.num_hit_tokens, **self._waits.stats()}

    def situation(self) -> Situation:
        """Of the step just scheduled, for the flight recorder."""
        plan = self._plans[-1]
        return Situation(len(plan.rows), plan.num_tokens, plan.num_entered, plan.num_prompts, len(self._running),
                         len(self._queue) + len(self._compiling), self.kv.pool.num_free)

    def request_records(self, limit: int | None = None) -> list[RequestRecord]:
        """The last requests that have ended, oldest first, then all that have not; with a limit at most so many that
        have ended, that run, and that wait, the next one to enter among them."""
        if limit is None:
            return [*self._ended, *map(self._record, self._requests.values())]
        ended = islice(reversed(self._ended), limit)
        return [*reversed(list(ended)), *map(self._record, islice(self._running, limit)),
                *map(self._record, self._first_waiting(limit))]

    def _first_waiting(self, limit: int) -> Iterable[Request]:
        head = self._queue.peek()
        others = (r for r in self._queue if r is not head)
        return islice(chain(() if head is None else (head,), others, self._compiling), limit)

    def _record(self, request: Request) -> RequestRecord:
        return make_record(request, waiting_for=self._waits_for(request))

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        held = [*self._running, *self._leaving]
        slots = [r.slot for r in held]
        assert sorted(slots + self._free_slots) == list(range(self._limits.num_slots)), "slots leak or are shared"
        assert sum(not r.will_be_complete for r in self._running) <= self._limits.max_num_seqs
        assert len(self._queue) == len(set(self._queue)), "the queue's count is wrong"
        assert not set(self._queue) & set(self._compiling), "a request without its grammar is in the queue"
        in_flight = [r for plan in self._plans for r in plan.rows]
        for request in {*self._requests.values(), *held}:
            assert request.num_in_flight == in_flight.count(request), f"{request}: steps in flight"
        for request in self._running:
            assert request.status is Status.RUNNING
            held_blocks = len(request.block_ids) + (request.copy_source >= 0)
            assert request.num_computed <= held_blocks * self.kv.block_size, f"{request}: too few blocks"
            assert len(request.token_ids) + request.num_placeholders <= request.max_total, f"{request}: too long"
        assert not self._copied
        self._forking.check_invariants()
        check_groups([*self._requests.values(), *self._running], self._queue, self._forking)
        for request in self._leaving:
            assert request.num_in_flight > 0 and request.status is not Status.RUNNING
        self.kv.check_invariants(held)

    def _waits_for(self, request: Request) -> WaitReason | None:
        """See RequestRecord.waiting_for."""
        if request.status is Status.RUNNING:
            return None
        if self._awaits_grammar(request):
            return "grammar"
        together = entering_with(request)
        if together[0] is not self._queue.peek():
            return "turn"
        if any(r.num_in_flight for r in together):
            return "output"
        seats = self._limits.max_num_seqs - sum(not r.will_be_complete for r in self._running)
        if len(together) > min(seats, len(self._free_slots)):
            return "max_num_seqs"
        if self.kv.num_blocks_to_enter(together[0], *sharing(together)) > self.kv.pool.num_free:
            return "kv_cache"
        return "max_num_batched_tokens"

    # Inside schedule().

    def _take_compiled(self) -> None:
        """Those whose grammar is ready join the queue."""
        for request, problem in self.grammars.take_compiled():
            if request not in self._compiling:
                continue  # it has failed and was too late as well
            if problem is not None:
                self._fail(request, problem)
            else:
                del self._compiling[request]
                self._waits.waited("grammar", self._clock() - request.queued)
                self._join_queue(request)

    def _schedule_running(self, step: StepBuilder) -> tuple[int, int, int]:
        """Rows for running requests; returns what is left of the token budget, how much of it prompts may have, and how
        many more may enter."""
        budget, block_size = self._limits.max_num_batched_tokens, self.kv.block_size
        self._forking.unpark(self.kv)
        # Not those whose last token is on its way: they need no row any more, so their seats are free already.
        live = [r for r in self._running if len(r.token_ids) + r.num_placeholders < r.max_total]
        decodes = any(len(r.token_ids) + r.num_placeholders - r.num_computed == 1 for r in live)
        prompts = self._prompt_budget.tokens(len(live) if decodes else 0, self._queue.num_tokens)
        later = len(live)
        for request in live:
            later -= 1
            if request.status is not Status.RUNNING or request.parked:
                continue  # preempted while this loop made room for another; or its prompt is being computed
            count = len(request.token_ids) + request.num_placeholders - request.num_computed
            if count > 1:  # Each request after this one can count on a token: prompts never starve those that decode.
                count = min(count, budget - later, prompts)
            if count <= 0:
                continue
            blocks: list[int] | None = _NO_BLOCKS
            if request.num_computed + count > len(request.block_ids) * block_size:
                blocks = self._make_room(request, request.num_computed + count)
            if blocks is None:
                continue
            if request.group is None:
                step.add(request, count, blocks)
            elif request.is_new:
                self._enter(step, request, count)
            else:
                step.add(request, count, blocks)
                if isinstance(request.group, BeamGroup):
                    request.parked = request.num_placeholders > 0  # until the search has chosen
                    if count == 1:
                        step.force(request)
            budget -= count
            if count > 1:
                prompts -= count
                self.kv.remember(request)
        return budget, max(0, prompts), self._limits.max_num_seqs - len(live)

    def _admit(self, step: StepBuilder, budget: int, seats: int) -> WaitReason:
        """Rows for waiting requests while seats, slots, blocks and budget last; which of them did not."""
        reason: WaitReason | None = None
        while budget and seats and self._free_slots:
            request = self._queue.peek()
            if request is None:
                break
            together = entering_with(request)
            # A preempted request's tokens in flight come back before it can be sent again.
            if any(r.num_in_flight for r in together):
                reason = "output"
                break
            if len(together) > min(seats, len(self._free_slots)):
                reason = "max_num_seqs"
                break
            if not self.kv.enter(request, *sharing(together)):
                reason = "kv_cache"
                break
            self._queue.pop()
            for one in together:
                one.slot = heapq.heappop(self._free_slots)
                one.status = Status.RUNNING
                one.is_new = True
                self._running[one] = None
                if not one.was_started:
                    self._tell_started(one, request.num_computed)
            if request.group is not None:
                self._forking.enter(request.group, together)
            count = min(len(request.token_ids) - request.num_computed, budget)
            self._enter(step, request, count)
            seats -= len(together)
            budget -= count
            self.kv.remember(request)
        if self._config.scheduling_policy == "priority":
            self._running = dict.fromkeys(sorted(self._running, key=lambda r: (r.priority, r.arrival)))
        return reason or ("max_num_batched_tokens" if seats and self._free_slots else "max_num_seqs")

    def _enter(self, step: StepBuilder, request: Request, count: int) -> None:
        """Its first row, with the block that it goes on from."""
        if request.copy_source >= 0:
            step.copy(request.copy_source, request.block_ids[request.num_computed // self.kv.block_size])
            self._copied.append(request.copy_source)
            request.copy_source = -1
        step.enter(request, count)
        request.is_new = False
        if isinstance(request.group, BeamGroup):
            request.parked = request.num_placeholders > 0

    def _tell_started(self, request: Request, num_cached: int) -> None:
        request.was_started = True
        request.num_cached_tokens = num_cached
        request.scheduled = self._clock()
        self._outboxes.of(request.client).started.append(Started(
            handle=request.handle, num_cached_tokens=request.num_cached_tokens, scheduled=request.scheduled))

    def _make_room(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks for a running request, preempting less important ones if need be. None: not in this step."""
        while (blocks := self.kv.grow(request, num_tokens)) is None:
            wanted = self.kv.blocks_for(num_tokens) - len(request.block_ids) - self.kv.pool.num_free
            if self._num_coming is None:
                self._num_coming = self._num_blocks_coming_back()
            if wanted <= self._num_coming:
                self._num_coming -= wanted
                return None
            victim = next(r for r in reversed(self._running) if not r.will_be_complete)
            coming = self._num_blocks_coming_back()
            self._preempt(victim)
            if request.status is not Status.RUNNING:
                return None
            self._num_coming += self._num_blocks_coming_back() - coming
        return blocks

    def _yield_to_urgent(self) -> None:
        """Preempts as many less important requests as the first in the queue needs to enter; none, if all were too
        few."""
        urgent = self._queue.peek()
        if urgent is None or not self._running or next(reversed(self._running)).priority <= urgent.priority:
            return
        together = entering_with(urgent)
        seats = self._limits.max_num_seqs - sum(not r.will_be_complete for r in self._running) - len(together)
        wanted = self.kv.num_blocks_to_enter(together[0], *sharing(together))
        room = self.kv.pool.num_free + self._num_blocks_coming_back() - wanted
        victims: list[Request] = []
        for request in reversed(self._running):
            if (seats >= 0 and room >= 0) or request.priority <= urgent.priority:
                break
            if not request.will_be_complete:
                victims.append(request)
                seats += 1
                room += len(request.block_ids)
        if seats >= 0 and room >= 0:
            for victim in victims:
                if victim.status is Status.RUNNING:  # not with its group already
                    self._preempt(victim)

    def _num_blocks_coming_back(self) -> int:
        """Blocks that nobody holds any more as soon as the steps in flight are back."""
        ending = (r for r in self._running if r.will_be_complete)
        held = Counter(block for r in chain(self._leaving, ending) for block in r.block_ids)
        return sum(map(self.kv.pool.is_last, held.keys(), held.values()))

    # Inside update().

    def _take_candidates(self, request: Request, group: BeamGroup, candidates: Candidates) -> None:
        """What may follow a beam. With the last of them the search goes on, or ends."""
        if request.first_token is None:
            request.first_token = self._clock()
        if not group.take(request, candidates):
            return
        for beam in group.beams:
            if group.is_running:
                self.kv.remember(beam)
            elif beam.status is Status.RUNNING:
                self._preempt(beam)  # as others of it were meanwhile
        if not group.advance(self.kv):
            first = group.members[0]
            self._end(first, Finished(handle=first.handle, reason=FinishReason.STOP, beams=found_by(first),
                                      num_preemptions=first.num_preemptions))

    def _follow_grammars(self, plan: StepPlan, tokens: list[int]) -> None:
        """Takes a step's tokens into the matchers of their requests. One that cannot go on ends its request before the
        token is told."""
        followed = [(request, request.matcher, token) for request, token in zip(plan.sampling, tokens, strict=True)
                    if request.matcher is not None and request.status is not Status.FINISHED]
        self.grammars.advance([(matcher, token) for _, matcher, token in followed])
        for request, matcher, _ in followed:
            if (problem := problem_of(matcher)) is not None:
                self._fail(request, problem)

    # Ends.

    def _preempt(self, request: Request) -> None:
        """Takes slot and blocks away, of its whole group; what was computed will be computed again. All or nothing:
        keeping some blocks would leave several requests each too short of blocks to go on."""
        group = request.group
        # A choice whose last token is on its way ends by itself; a beam waits for the others, and keeps its blocks.
        together = [request] if group is None else [
            r for r in group.members if r.status is Status.RUNNING
            and (not r.will_be_complete or isinstance(group, BeamGroup))]
        for one in together:
            del self._running[one]
            one.status = Status.PREEMPTED
            one.num_preemptions += 1
            one.parked = False
            self._num_preemptions += 1
            self._leave(one)
        if group is not None:
            self._forking.stop(group)
            if group.queued is not None:  # others of it wait already
                return
            group.queued = together[0]
        self._waits.elapse(self._clock(), len(self._queue))
        self._queue.put_back(together[0])

    def _end(self, request: Request, word: Finished | None = None) -> None:
        """Ends a request wherever it is, and tells its frontend if there is a word."""
        del self._requests[request.client, request.handle]
        group = request.group
        for one in reversed(group.members.copy()) if isinstance(group, BeamGroup) else [request]:
            self._stop(one)
        reason = FinishReason.ABORT if word is None else word.reason
        self._ended.append(make_record(request, finished=self._clock(), reason=str(reason)))
        if word is not None:
            self._outboxes.of(request.client).finished.append(word)

    def _stop(self, request: Request) -> None:
        """Takes it out of wherever it is."""
        was_running, was_outside = request.status is Status.RUNNING, self._awaits_grammar(request)
        if was_running:
            del self._running[request]
        elif was_outside:
            self._compiling.pop(request, None)
        elif request.group is None or request is request.group.queued:
            self._waits.elapse(self._clock(), len(self._queue))
            self._queue.forget(request)
        request.status = Status.FINISHED
        if request.group is not None:
            self._part(request, request.group, was_outside)
        if was_running:
            self._leave(request)

    def _part(self, request: Request, group: Group, was_outside: bool) -> None:
        """One of a group has ended; the others go on without it. was_outside: of the queue, for a grammar."""
        request.parked = False
        group.members.remove(request)
        if request is group.queued:
            group.queued = next(iter(group.waiting), None)
            if group.queued is not None and not was_outside:
                self._queue.put_back(group.queued)
        if was_outside and group.queued is not None:
            self._join_queue(group.queued)
        if request in group.forks:
            group.forks.remove(request)
        if not group.forks:
            self._forking.stop(group)
        elif request is group.source and request.num_computed < request.num_prompt:
            self._preempt(group.forks[0])  # nobody computes their prompt now

    def _fail(self, request: Request, problem: str) -> None:
        """Ends a request whose grammar cannot be followed."""
        self._end(request, Finished(handle=request.handle, reason=FinishReason.ERROR, error=problem,
                                    field=request.grammar_field, num_preemptions=request.num_preemptions))

    def _leave(self, request: Request) -> None:
        self._leaving[request] = None
        if request.num_in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """No step in flight touches its slot and blocks any more."""
        del self._leaving[request]
        heapq.heappush(self._free_slots, request.slot)
        request.slot = -1
        self.kv.free(request)

    def _next_own_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1:] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _expire(self) -> None:
        while (deadline := self._next_own_deadline()) is not None and deadline <= self._clock():
            request = self._requests[heapq.heappop(self._deadlines)[1:]]
            self._end(request, Finished(handle=request.handle, reason=FinishReason.ABORT, stop_reason="deadline",
                                        num_preemptions=request.num_preemptions, beams=found_by(request)))
