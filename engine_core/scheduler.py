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
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from sidestep.engine_core.flight_recorder import Situation
from sidestep.engine_core.kv_cache_manager import KVCacheManager
from sidestep.engine_core.logprobs import share_logprobs
from sidestep.engine_core.request import Request, Status, make_record
from sidestep.engine_core.request_queue import QUEUES
from sidestep.engine_core.step_plan import StepBuilder, StepPlan
from sidestep.engine_core.structured_outputs import Grammars, problem_of
from sidestep.ipc.config import SchedulerConfig, StepLimits
from sidestep.ipc.messages import AddRequest, Finished, FinishReason, Outputs, Started, pack_ids
from sidestep.ipc.records import RequestRecord
from sidestep.ipc.step import StepInput, StepMasks, StepOutput

_NO_BLOCKS: list[int] = []
_REMEMBERED = 4096
"""Requests that have ended and are still known to `request_records`."""


@dataclass(slots=True)
class _Outbox:
    """What one frontend will be told next."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""


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
        self._plans: deque[StepPlan] = deque()
        self._next_step = 0
        self._last_masked = -1
        """The last step whose masks were taken."""
        self._outboxes: dict[int, _Outbox] = {}
        self._deadlines: list[tuple[float, int, int]] = []
        """Time, client, handle; not the request, whose tokens would be kept until then."""
        self._num_coming: int | None = None
        """Blocks that steps in flight will give back and that nobody in this step counts on; None until asked for."""
        self._num_preemptions = 0
        self._ended: deque[RequestRecord] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return (f"Scheduler(running={len(self._running)}, waiting={len(self._queue)}, "
                f"in_flight={len(self._plans)}, {self.kv!r})")

    # What frontends ask for.

    def add(self, message: AddRequest) -> None:
        """Takes a request; one that can never run is ended at once."""
        request = Request.from_message(message, self._max_model_len, self._eos)
        if not 0 < request.num_prompt < self._max_model_len:
            problem = "prompt: is empty" if not request.num_prompt else (
                f"prompt: {request.num_prompt} tokens and one of output are more than the "
                f"{self._max_model_len} that fit")
            self._outbox(request.client).finished.append(
                Finished(handle=request.handle, reason=FinishReason.ERROR, error=problem))
            return
        if message.grammar is not None and (why := self.grammars.start(request, message.grammar)) is not None:
            self._outbox(request.client).finished.append(
                Finished(handle=request.handle, reason=FinishReason.ERROR, error=why, field=request.grammar_field))
            return
        request.queued = self._clock()
        self._requests[request.client, request.handle] = request
        if message.grammar is not None and request.matcher is None:
            self._compiling[request] = None
        else:
            self._queue.add(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.client, request.handle))

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
        step = StepBuilder(self._next_step)
        self._num_coming = None
        # 1. A more urgent request that waits takes the place of the least important that run.
        if self._config.scheduling_policy == "priority":
            self._yield_to_urgent()
        # 2. Those that run, most important first: one token each, or a chunk of prompt.
        num_preemptions = self._num_preemptions
        budget, seats = self._schedule_running(step)
        # 3. Those that wait, unless somebody in 2 had to give way: what is free now is his.
        if self._queue and self._num_preemptions == num_preemptions:
            self._admit(step, budget, seats)
        if step.is_empty:
            return None
        # 4. Remember what is in flight.
        message, plan = step.build()
        self._plans.append(plan)
        self._next_step += 1
        return message

    def update(self, output: StepOutput) -> dict[int, Outputs]:
        """Takes the oldest step's tokens; returns what each frontend must be told."""
        plan = self._plans.popleft()
        assert plan.step_id == output.step_id, f"output of step {output.step_id} came for step {plan.step_id}"
        block_size = self.kv.block_size
        tokens = output.token_ids.tolist()
        if plan.masked:
            self._follow_grammars(plan, tokens)
        for client, told in share_logprobs(output.logprobs, plan.sampling):
            self._outbox(client).logprobs = told
        for client, told in share_logprobs(output.prompt_logprobs, plan.rows):
            self._outbox(client).prompt_logprobs = told
        # 1. Tokens take the place of placeholders. Those of requests that have ended are dropped.
        for request, token in zip(plan.sampling, tokens, strict=True):
            request.num_placeholders -= 1
            if request.status is Status.FINISHED:
                continue
            outbox = self._outbox(request.client)
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
        boxes, self._outboxes = self._outboxes, {}
        return {client: Outputs(handles=pack_ids(box.handles), token_ids=pack_ids(box.tokens), started=box.started,
                                finished=box.finished, logprobs=box.logprobs, prompt_logprobs=box.prompt_logprobs)
                for client, box in boxes.items()}

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
        return len(self._queue) + len(self._compiling)

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
            "prefix_cache_hits": self.kv.num_hit_tokens}

    def situation(self) -> Situation:
        """Of the step just scheduled, for the flight recorder."""
        plan = self._plans[-1]
        return Situation(len(plan.rows), plan.num_tokens, plan.num_entered, len(self._running), self.num_waiting,
                         self.kv.pool.num_free)

    def request_records(self) -> list[RequestRecord]:
        """The last requests that have ended, oldest first, then all that have not."""
        return [*self._ended, *(make_record(r, waiting_for=self._waits_for(r)) for r in self._requests.values())]

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        held = [*self._running, *self._leaving]
        slots = [r.slot for r in held]
        assert sorted(slots + self._free_slots) == list(range(self._limits.num_slots)), "slots leak or are shared"
        assert sum(not r.will_be_complete for r in self._running) <= self._limits.max_num_seqs
        assert len(self._queue) == len(set(self._queue)), "the queue's count is wrong"
        assert not set(self._queue) & set(self._compiling), "a request without its grammar is in the queue"
        assert len(self._requests) == len(self._running) + self.num_waiting, "a request is nowhere"
        in_flight = [r for plan in self._plans for r in plan.rows]
        for request in {*self._requests.values(), *held}:
            assert request.num_in_flight == in_flight.count(request), f"{request}: steps in flight"
        for request in self._running:
            assert request.status is Status.RUNNING
            assert request.num_computed <= len(request.block_ids) * self.kv.block_size, f"{request}: too few blocks"
            assert len(request.token_ids) + request.num_placeholders <= request.max_total, f"{request}: too long"
        for request in self._leaving:
            assert request.num_in_flight > 0 and request.status is not Status.RUNNING
        self.kv.check_invariants(held)

    def _waits_for(self, request: Request) -> str | None:
        """See RequestRecord.waiting_for."""
        if request.status is Status.RUNNING:
            return None
        if request in self._compiling:
            return "grammar"
        if request is not self._queue.peek():
            return "turn"
        if request.num_in_flight:
            return "output"
        if sum(not r.will_be_complete for r in self._running) >= self._limits.max_num_seqs or not self._free_slots:
            return "max_num_seqs"
        if self.kv.blocks_for(len(request.token_ids)) > self.kv.pool.num_free:
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
                self._queue.add(request)

    def _schedule_running(self, step: StepBuilder) -> tuple[int, int]:
        """Rows for running requests; returns what is left of the token budget, and how many more may enter."""
        budget, block_size = self._limits.max_num_batched_tokens, self.kv.block_size
        # Not those whose last token is on its way: they need no row any more, so their seats are free already.
        live = [r for r in self._running if len(r.token_ids) + r.num_placeholders < r.max_total]
        later = len(live)
        for request in live:
            later -= 1
            if request.status is not Status.RUNNING:
                continue  # preempted while this loop made room for another
            count = len(request.token_ids) + request.num_placeholders - request.num_computed
            if count > 1:  # Each request after this one can count on a token: prompts never starve those that decode.
                count = min(count, budget - later)
            blocks: list[int] | None = _NO_BLOCKS
            if request.num_computed + count > len(request.block_ids) * block_size:
                blocks = self._make_room(request, request.num_computed + count)
            if blocks is None:
                continue
            step.add(request, count, blocks)
            budget -= count
            if count > 1:
                self.kv.remember(request)
        return budget, self._limits.max_num_seqs - len(live)

    def _admit(self, step: StepBuilder, budget: int, seats: int) -> None:
        """Rows for waiting requests while seats, slots, blocks and budget last."""
        while budget and seats and self._free_slots:
            request = self._queue.peek()
            # A preempted request's tokens in flight come back before it can be sent again.
            if request is None or request.num_in_flight or not self.kv.enter(request):
                break
            self._queue.pop()
            request.slot = heapq.heappop(self._free_slots)
            request.status = Status.RUNNING
            self._running[request] = None
            if not request.was_started:
                self._tell_started(request)
            count = min(len(request.token_ids) - request.num_computed, budget)
            step.enter(request, count)
            seats -= 1
            budget -= count
            self.kv.remember(request)
        if self._config.scheduling_policy == "priority":
            self._running = dict.fromkeys(sorted(self._running, key=lambda r: (r.priority, r.arrival)))

    def _tell_started(self, request: Request) -> None:
        request.was_started = True
        request.num_cached_tokens = request.num_computed
        request.scheduled = self._clock()
        self._outbox(request.client).started.append(Started(
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
            self._preempt(victim)
            if victim is request:
                return None
            if victim.num_in_flight:
                self._num_coming += len(victim.block_ids)
        return blocks

    def _yield_to_urgent(self) -> None:
        """Preempts as many less important requests as the first in the queue needs to enter; none, if all were too
        few."""
        urgent = self._queue.peek()
        if urgent is None or not self._running or next(reversed(self._running)).priority <= urgent.priority:
            return
        seats = self._limits.max_num_seqs - sum(not r.will_be_complete for r in self._running)
        room = self.kv.pool.num_free + self._num_blocks_coming_back() - self.kv.blocks_for(len(urgent.token_ids))
        victims: list[Request] = []
        for request in reversed(self._running):
            if (seats > 0 and room >= 0) or request.priority <= urgent.priority:
                break
            if not request.will_be_complete:
                victims.append(request)
                seats += 1
                room += len(request.block_ids)
        if seats > 0 and room >= 0:
            for victim in victims:
                self._preempt(victim)

    def _num_blocks_coming_back(self) -> int:
        """Blocks of requests that leave as soon as the steps in flight are back. A block that is shared with one that
        stays counts too: then somebody waits a step in vain."""
        ending = (r for r in self._running if r.will_be_complete)
        return sum(len(r.block_ids) for r in chain(self._leaving, ending))

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
        """Takes slot and blocks away; what was computed will be computed again. All or nothing: keeping some blocks
        would leave several requests each too short of blocks to go on."""
        del self._running[request]
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._queue.put_back(request)
        self._leave(request)

    def _end(self, request: Request, word: Finished | None = None) -> None:
        """Ends a request wherever it is, and tells its frontend if there is a word."""
        if request.status is Status.RUNNING:
            del self._running[request]
        elif request in self._compiling:
            del self._compiling[request]
        else:
            self._queue.forget()
        was_running = request.status is Status.RUNNING
        request.status = Status.FINISHED
        del self._requests[request.client, request.handle]
        reason = FinishReason.ABORT if word is None else word.reason
        self._ended.append(make_record(request, finished=self._clock(), reason=str(reason)))
        if word is not None:
            self._outbox(request.client).finished.append(word)
        if was_running:
            self._leave(request)

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
                                        num_preemptions=request.num_preemptions))

    def _outbox(self, client: int) -> _Outbox:
        box = self._outboxes.get(client)
        if box is None:
            box = self._outboxes[client] = _Outbox()
        return box
