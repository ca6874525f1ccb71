"""All that the core keeps of one request, and of requests that belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from sidestep.engine_core.requests.candidates import Candidates
from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.held_blocks import HeldBlocks
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.progress import Progress
from sidestep.engine_core.requests.request_drafts import RequestDrafts
from sidestep.engine_core.requests.timing import Timing
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.transport.messages import AddRequest, Beam, FinishReason, unpack_ids


@dataclass(slots=True, eq=False, kw_only=True)
class Request(Progress):
    """A request and its state, which its methods alone change.

    `eq=False`: the scheduler compares requests by identity, and that is faster.
    """

    client: int
    handle: int
    request_id: str
    sampling: SamplingParams
    stop_ids: frozenset[int]
    """Tokens that end it."""
    eos_ids: frozenset[int]
    """The ids of `stop_ids` that are the model's own end of sequence."""
    timing: Timing
    priority: int = 0
    cache_salt: str | None = None
    num_public_tokens: int = 0
    """Blocks of these first tokens alone are shared as if there were no salt."""
    deadline: float | None = None
    group: Group | None = None
    """The group that it belongs to; None if it is alone."""
    controls: bytes = b""
    """Encoded controls for the workers; see ipc/params/logits_controls.py."""
    has_past_sent: bool = False
    """Whether workers get all of its tokens when it enters, also those in the cache."""
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    max_drafts: int = 0
    """Most drafts of a step."""
    drafts: RequestDrafts = field(default_factory=RequestDrafts)
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first scheduled."""
    was_started: bool = False
    """Whether its frontend knows that it has been scheduled."""
    grammar: GrammarState | None = None
    """State of its output in its grammar, if it has one."""
    pooling: PoolingType | None = None
    """How its vector is made; None for a request that generates text."""

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name.lower()}, slot={self.slot}, "
            f"tokens={len(self.token_ids)}/{self.max_total}, computed={self.num_computed}, "
            f"in_flight={self.num_in_flight}, blocks={len(self.blocks.ids)})"
        )

    @classmethod
    def from_message(
        cls,
        message: AddRequest,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        max_drafts: int = 0,
    ) -> Self:
        """Return a waiting request."""
        prompt, outputs = unpack_ids(message.prompt_token_ids), unpack_ids(message.output_token_ids)
        tokens: list[int] = [*prompt.tolist(), *outputs.tolist()]
        sampling, longest = message.sampling, max_model_len
        if message.pooling is not None:
            longest = len(prompt) + 1  # its vector counts as an output that is never computed
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        wanted = longest if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        return cls(
            client=message.client,
            handle=message.handle,
            request_id=message.request_id,
            token_ids=tokens,
            num_prompt=len(prompt),
            sampling=sampling,
            max_total=min(wanted, longest),
            stop_ids=eos | frozenset(sampling.stop_token_ids or ()),
            eos_ids=eos,
            timing=Timing(message.arrival),
            priority=message.priority,
            cache_salt=message.cache_salt,
            num_public_tokens=message.num_public_tokens,
            deadline=message.deadline,
            controls=message.controls,
            # A proposer looks at all tokens, also at those in the cache.
            has_past_sent=bool(message.controls) or max_drafts > 0,
            max_drafts=max_drafts,
            pooling=message.pooling,
        )

    @property
    def lacks_matcher(self) -> bool:
        """Whether it has a grammar that has not been compiled for it."""
        return self.grammar is not None and self.grammar.matcher is None

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its whole prompt must be computed, because its result has a part of each token.

        It asks for prompt_logprobs, or for a vector of other tokens than the last.
        """
        if self.pooling is not None:
            return self.pooling != "last"
        return self.sampling.prompt_logprobs is not None and self.timing.first_token is None

    @property
    def will_be_complete(self) -> bool:
        """Whether the tokens in flight are its last: it stops by length when they come back.

        This is never true of a beam: it waits for the other beams of its search, which may be in
        steps to come.
        """
        return len(self.token_ids) + self.num_sampling >= self.max_total and not self.is_beam

    @property
    def is_beam(self) -> bool:
        """Whether its group chooses its tokens."""
        return self.group is not None and self.group.chooses_tokens

    def join(self, group: Group, max_total: int) -> None:
        """Become a member of a group, none of which may have more than `max_total` tokens."""
        self.group = group
        self.max_total = min(self.max_total, max_total)

    def become_beam(self, controls: bytes, *, is_first: bool) -> None:
        """Let a search choose its tokens. The frontend hears of the search's first beam alone.

        controls: those that ask the workers for candidates.
        """
        self.controls, self.has_past_sent = controls, False
        self.was_started = not is_first

    def restrict(self, grammar: GrammarState) -> None:
        """Let its output follow a grammar."""
        self.grammar = grammar

    def started(self, num_cached_tokens: int, now: float) -> None:
        """Note that its frontend gets to know that it has been scheduled."""
        self.was_started = True
        self.num_cached_tokens = num_cached_tokens
        self.timing.scheduled_at(now)

    def sampled(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Append a sampled token; return why the request ends with it, or None.

        The end of its grammar is not looked at.
        """
        self.token_ids.append(token)
        if token in self.stop_ids and self.num_outputs >= max(1, self.sampling.min_tokens):
            return FinishReason.STOP, None if token in self.eos_ids else token
        if len(self.token_ids) >= self.max_total:
            return FinishReason.LENGTH, None
        detection = self.sampling.repetition_detection
        if (
            detection is not None
            and self.num_outputs >= self.sampling.min_tokens
            and detection.found_in(self.token_ids, self.num_prompt)
        ):
            return FinishReason.REPETITION, None
        return None

    def fork(self, other: Request) -> None:
        """Take over the known tokens of another beam."""
        self.token_ids = other.token_ids.copy()
        self.blocks.copy_hashes(other.blocks)

    def chosen(self, token: int) -> None:
        """Take the next token, which its search has chosen, and have rows again."""
        self.token_ids.append(token)
        self.parked = False


class Decision(NamedTuple):
    """The decision of a group whose members have all had their rows."""

    branches: list[tuple[Request, Request]]
    """Pairs of members: the second must continue all that the first has computed."""
    is_over: bool = False
    """Whether the group ends."""


@dataclass(slots=True, eq=False)
class Group:
    """Requests that belong together.

    `members` have not ended, and are in the order of their indices.
    """

    members: list[Request]
    queued: Request | None = None
    """The member that stands in the queue for all that wait, and enters first."""
    source: Request | None = None
    """The member that computes the prompt for `forks`."""
    forks: list[Request] = field(default_factory=list)
    """Members that run, but are parked until the prompt is computed."""

    @property
    def chooses_tokens(self) -> bool:
        """Whether the group chooses its members' tokens, when all of them have had their rows.

        The log-probabilities of these rows then go to the group, not to the frontend.
        """
        return False

    @property
    def waiting(self) -> list[Request]:
        """Members that enter together."""
        return [
            r for r in self.members if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ]

    def ending_with(self, request: Request) -> list[Request]:
        """Return a member and all that end with it, in the order in which they are stopped."""
        return [request]

    def result(self, eos_ids: frozenset[int]) -> list[Beam]:
        """Return the beams that a search has found so far; none for other groups.

        eos_ids: the model's own ends of sequence.
        """
        return []

    def sharing(self, together: Sequence[Request]) -> Sequence[Request]:
        """Return the requests that get blocks from the first of those that enter together."""
        return together[1:]

    def enter(self, together: Sequence[Request]) -> None:
        """Note that these have got their slots and blocks; all but the first are parked."""
        self.queued = None
        for request in together[1:]:
            request.park()
        self.forks = list(self.sharing(together))
        self.source = together[0] if self.forks else None

    def queue(self, request: Request) -> None:
        """Note that a member stands in the queue for all that wait."""
        self.queued = request

    def row_planned(self, request: Request) -> bool:
        """Note that the next step has a row of a member that samples.

        Return whether the group has chosen the row's token, which the member has not sampled.
        """
        return False

    def take(self, request: Request, candidates: Candidates) -> Decision | None:
        """Take the result of a member's row; return what follows for the group, None for nothing.

        Called if `chooses_tokens`.
        """
        return None

    def part(self, request: Request) -> None:
        """Go on without a member that has ended.

        If it stood in the queue, another member that waits does so from now on.
        """
        self.members.remove(request)
        if request is self.queued:
            self.queued = next(iter(self.waiting), None)
        if request in self.forks:
            self.forks.remove(request)

    def stop_forking(self) -> None:
        """Note that no member waits for the prompt any more."""
        self.source = None
        self.forks.clear()


def without_complete(running: Iterable[Request]) -> list[Request]:
    """Return the running requests that still need rows: `will_be_complete` is not true of them.

    Each step calls it, and calls the property of a few requests only.
    """
    return [r for r in running if len(r.token_ids) + r.num_sampling < r.max_total or r.is_beam]


def grammars_of(requests: Iterable[Request]) -> list[GrammarState]:
    """Return the grammar of each request; all of them have one."""
    return [request.grammar for request in requests if request.grammar is not None]
