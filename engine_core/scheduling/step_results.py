"""The effects of a step's output on its requests.

Tokens replace placeholders, grammars and searches advance, requests end, and frontends get their
messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidestep.engine_core.groups.beams import candidates_of_beams
from sidestep.engine_core.groups.request_logprobs import share_logprobs
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.candidates import Candidates
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Group, Request
from sidestep.engine_core.scheduling.outbox import Outboxes
from sidestep.engine_core.scheduling.policies.policy import Policy
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
        policy: Policy,
        kv: KVCacheManager,
        grammars: Grammars,
        outboxes: Outboxes,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._policy = policy
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
                if request.grammar is not None:
                    request.grammar.expect(drafts)

    def take(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the output of a step that was planned as `plan`."""
        if len(output.vectors):
            self._take_vectors(plan, output)
        else:
            self._take_tokens_of(plan, output)
        # Slots and blocks that no step in flight touches any more go back.
        for request in plan.rows:
            if request.row_is_back():
                self._roster.release(request)

    def _take_vectors(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the vectors of a step's rows, each of which ends its request."""
        vectors = output.vectors.reshape(len(plan.sampling), -1)
        for request, vector in zip(plan.sampling, vectors, strict=True):
            request.take_sample(0, 0)
            if request.status is RequestStatus.FINISHED:
                continue
            request.timing.first_token_at(self._clock())
            outbox = self._outboxes.of(request.client)
            outbox.pooled.append(request.handle)
            outbox.vectors.append(vector.tobytes())
            self._roster.end(request, FinishReason.STOP)

    def _take_tokens_of(self, plan: StepPlan, output: StepOutput) -> None:
        """Take the tokens of a step's rows, and what belongs to them."""
        for client, told in share_logprobs(output.logprobs, plan.sampling, plan.late):
            self._outboxes.of(client).logprobs = told
        for client, told in share_logprobs(output.prompt_logprobs, plan.rows):
            self._outboxes.of(client).prompt_logprobs = told
        candidates = (
            candidates_of_beams(output.logprobs, plan.sampling) if len(output.logprobs) else {}
        )
        self._count_drafts(plan, output)
        # Tokens replace placeholders. Tokens of requests that have ended are dropped.
        late, most = plan.late, plan.num_drafts
        for request, tokens in zip(plan.sampling, output.by_row(), strict=True):
            if late and request in late:
                continue
            request.take_sample(plan.drafts_of(request) if most else 0, len(tokens) - 1)
            if request.status is RequestStatus.FINISHED:
                continue
            if candidates and request.group is not None and request in candidates:
                self._take_candidates(request.group, request, candidates[request])
            else:
                self._take_tokens(request, tokens)

    def _count_drafts(self, plan: StepPlan, output: StepOutput) -> None:
        """Count and charge a step's drafts for their requests, before the step ends any."""
        if not len(output.num_drafts):
            return
        verified = output.num_drafts.tolist()
        self._policy.charge(zip(plan.sampling, verified, strict=True))
        for request, drafts, size in zip(
            plan.sampling, verified, output.sizes.tolist(), strict=True
        ):
            if drafts:
                request.drafts.verified(drafts, size - 1)

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
            finish = request.sampled(token)
            if finish is not None:
                break
        # Its length may have ended it before its grammar does.
        if ends_grammar and not left and (finish is None or finish[0] is not FinishReason.STOP):
            finish = FinishReason.STOP, None
        # A block that has become full can be shared from now on.
        if (
            min(request.num_computed, len(request.token_ids)) // self._kv.block_size
            > request.blocks.num_registered
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

    def _take_candidates(self, group: Group, request: Request, candidates: Candidates) -> None:
        """Give a member's candidates to its group, and do what the group decides."""
        if request.timing.first_token is None:
            request.timing.first_token_at(self._clock())
        if request.status is RequestStatus.RUNNING:
            self._kv.remember(request)
        decision = group.take(request, candidates)
        if decision is None:
            return
        for source, member in decision.branches:
            self._kv.branch(source, member)
        if decision.is_over:
            self._roster.end(group.members[0], FinishReason.STOP)
