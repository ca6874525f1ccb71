"""The effects of a step's output on its requests.

Tokens replace placeholders, grammars and searches advance, requests end, and frontends get their
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.engine_core.groups.beam_search import Candidates
from sidestep.engine_core.groups.beams import BeamGroup, candidates_of_beams
from sidestep.engine_core.groups.request_logprobs import share_logprobs
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.request import Request, RequestStatus
from sidestep.engine_core.scheduling.outbox import Outboxes
from sidestep.engine_core.scheduling.roster import Roster
from sidestep.engine_core.scheduling.step_plan import StepPlan
from sidestep.engine_core.structured_outputs.grammars import Grammars, follow, problem_of
from sidestep.ipc.transport.messages import FinishReason
from sidestep.ipc.transport.step import StepOutput


class StepResults:
    """Takes the outputs of steps, the oldest first."""

    def __init__(
        self,
        roster: Roster,
        kv: KVCacheManager,
        grammars: Grammars,
        outboxes: Outboxes,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._kv = kv
        self._grammars = grammars
        self._outboxes = outboxes
        self._clock = clock

    def __repr__(self) -> str:
        return f"StepResults({self._roster!r})"

    def follow_grammars(self, plan: StepPlan, output: StepOutput) -> None:
        """Give a step's tokens to the matchers of their requests, before `take`.

        A matcher that cannot go on ends its request before the token is sent.
        """
        followed = [
            (request, grammar, matcher, tokens)
            for request, tokens in zip(plan.sampling, output.by_row(), strict=True)
            if (grammar := request.grammar) is not None
            and (matcher := grammar.matcher) is not None
            and request.status is not RequestStatus.FINISHED
            and request not in plan.late
        ]
        single = [(matcher, tokens[0]) for _, _, matcher, tokens in followed if len(tokens) == 1]
        self._grammars.advance(single)
        for request, grammar, matcher, tokens in followed:
            grammar.followed(follow(matcher, tokens))
            if (problem := problem_of(matcher)) is not None:
                self._roster.fail(request, problem)
        if len(output.next_sizes):
            for request, drafts in zip(plan.sampling, output.next_by_row(), strict=True):
                request.next_drafts = drafts

    def take(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the output of a step that was planned as `plan`."""
        for client, told in share_logprobs(output.logprobs, plan.sampling, plan.late):
            self._outboxes.of(client).logprobs = told
        for client, told in share_logprobs(output.prompt_logprobs, plan.rows):
            self._outboxes.of(client).prompt_logprobs = told
        candidates = (
            candidates_of_beams(output.logprobs, plan.sampling) if len(output.logprobs) else {}
        )
        self._count_drafts(plan, output)
        # 1. Tokens replace placeholders. Tokens of requests that have ended are dropped.
        late, most = plan.late, plan.num_drafts
        for request, tokens in zip(plan.sampling, output.by_row(), strict=True):
            if late and request in late:
                continue
            request.take_sample(plan.drafts_of(request) if most else 0, len(tokens) - 1)
            if request.status is RequestStatus.FINISHED:
                continue
            if candidates and isinstance(request.group, BeamGroup):
                self._take_candidates(request, request.group, candidates[request])
            else:
                self._take_tokens(request, tokens)
        # 2. Slots and blocks that no step in flight touches any more go back.
        for request in plan.rows:
            request.num_in_flight -= 1
            if request.num_in_flight == 0 and request.status is not RequestStatus.RUNNING:
                self._roster.release(request)

    def _count_drafts(self, plan: StepPlan, output: StepOutput) -> None:
        """Add a step's drafts to the counts of their requests, before the step ends any."""
        if not len(output.num_drafts):
            return
        for request, drafts, size in zip(
            plan.sampling, output.num_drafts.tolist(), output.sizes.tolist(), strict=True
        ):
            request.num_verifying_steps += drafts > 0
            request.num_verified += drafts
            request.num_accepted += size - 1

    def _take_tokens(self, request: Request, tokens: Sequence[int]) -> None:
        """Take a row's tokens in their order, up to the one that ends the request."""
        outbox, handle = self._outboxes.of(request.client), request.handle
        if request.timing.first_token is None:
            request.timing.first_token_at(self._clock())
        ends_grammar = False
        if request.grammar is not None and request.grammar.end >= 0:
            tokens, ends_grammar = tokens[: request.grammar.end + 1], True
        finish, left = None, len(tokens)
        for token in tokens:
            outbox.handles.append(handle)
            outbox.tokens.append(token)
            left -= 1
            finish = request.finish_of(token)
            if finish is not None:
                break
        # Its length may have ended it before its grammar does.
        if ends_grammar and not left and (finish is None or finish[0] is not FinishReason.STOP):
            finish = FinishReason.STOP, None
        # A block that has become full can be shared from now on.
        if (
            min(request.num_computed, len(request.token_ids)) // self._kv.block_size
            > request.num_registered
            and request.status is RequestStatus.RUNNING
        ):
            self._kv.remember(request)
        if finish is not None:
            reason, stop_reason = finish
            self._roster.end(
                request,
                reason,
                stop_reason=stop_reason,
                completes_grammar=reason is FinishReason.STOP and token not in request.stop_ids,
            )

    def _take_candidates(self, request: Request, group: BeamGroup, candidates: Candidates) -> None:
        """Take the candidates of a beam. After the last beam's, the search advances or ends."""
        if request.timing.first_token is None:
            request.timing.first_token_at(self._clock())
        if not group.take(request, candidates):
            return
        for beam in group.beams:
            if group.is_running:
                self._kv.remember(beam)
            elif beam.status is RequestStatus.RUNNING:
                self._roster.preempt(beam)  # as other members were meanwhile
        if not group.advance(self._kv):
            self._roster.end(group.members[0], FinishReason.STOP)
