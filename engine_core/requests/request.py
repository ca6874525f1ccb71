"""All that the core keeps of one request, and of requests that belong together."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.timing import Timing
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.transport.messages import AddRequest, Beam, FinishReason, unpack_ids
from sidestep.ipc.transport.records import RequestRecord, WaitReason


class RequestStatus(enum.IntEnum):
    """State of a request in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """A request and its state.

    `eq=False`: the scheduler compares requests by identity, and that is faster.
    """

    client: int
    handle: int
    request_id: str
    token_ids: list[int]
    """The prompt, then the known outputs."""
    num_prompt: int
    sampling: SamplingParams
    max_total: int
    """Prompt plus the most outputs it may have."""
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
    parked: bool = False
    """Whether it runs, but gets no row in any step for now."""
    is_new: bool = False
    """Whether the worker's row of its slot is still an older one, of another request or its own."""
    copy_source: int = -1
    """A block that it holds until its own block of the next token has become a copy of it.

    -1 for none.
    """
    controls: bytes = b""
    """Encoded controls for the workers; see ipc/params/logits_controls.py."""
    has_past_sent: bool = False
    """Whether workers get all of its tokens when it enters, also those in the cache."""
    status: RequestStatus = RequestStatus.WAITING
    slot: int = -1
    """The worker's row, from being scheduled until it ends or is preempted; -1 without one."""
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids`, as far as they were needed."""
    num_registered: int = 0
    """How many of its blocks the pool knows by hash."""
    num_computed: int = 0
    """Tokens computed, or being computed by a step in flight if it accepts all of its drafts."""
    num_placeholders: int = 0
    """Tokens that steps in flight will add if they accept all of their drafts."""
    num_sampling: int = 0
    """Steps in flight that sample for it: each adds at least one token."""
    num_in_flight: int = 0
    """Steps in flight that touch its slot and blocks."""
    max_drafts: int = 0
    """Most drafts of a step."""
    next_drafts: Sequence[int] = ()
    """Drafts that the worker has for the next step; known only of a request with a grammar."""
    num_verifying_steps: int = 0
    """Steps that have verified drafts."""
    num_verified: int = 0
    """Drafts that have been verified."""
    num_accepted: int = 0
    """Drafts that have been accepted."""
    next_beat: int = 0
    """First beat of the pipeline in which the first stage has its token and can go on."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first scheduled."""
    num_preemptions: int = 0
    was_started: bool = False
    """Whether its frontend knows that it has been scheduled."""
    grammar: GrammarState | None = None
    """State of its output in its grammar, if it has one."""

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name.lower()}, slot={self.slot}, "
            f"tokens={len(self.token_ids)}/{self.max_total}, computed={self.num_computed}, "
            f"in_flight={self.num_in_flight}, blocks={len(self.block_ids)})"
        )

    @classmethod
    def from_message(
        cls, message: AddRequest, max_model_len: int, eos_token_ids: frozenset[int]
    ) -> Self:
        """Return a waiting request."""
        prompt, outputs = unpack_ids(message.prompt_token_ids), unpack_ids(message.output_token_ids)
        tokens: list[int] = [*prompt.tolist(), *outputs.tolist()]
        sampling = message.sampling
        eos = frozenset() if sampling.ignore_eos else eos_token_ids
        wanted = max_model_len if sampling.max_tokens is None else len(prompt) + sampling.max_tokens
        return cls(
            client=message.client,
            handle=message.handle,
            request_id=message.request_id,
            token_ids=tokens,
            num_prompt=len(prompt),
            sampling=sampling,
            max_total=min(wanted, max_model_len),
            stop_ids=eos | frozenset(sampling.stop_token_ids or ()),
            eos_ids=eos,
            timing=Timing(message.arrival),
            priority=message.priority,
            cache_salt=message.cache_salt,
            num_public_tokens=message.num_public_tokens,
            deadline=message.deadline,
            controls=message.controls,
            has_past_sent=bool(message.controls),
        )

    @property
    def num_outputs(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def lacks_matcher(self) -> bool:
        """Whether it has a grammar that has not been compiled for it."""
        return self.grammar is not None and self.grammar.matcher is None

    @property
    def must_tell_of_prompt(self) -> bool:
        """Whether its whole prompt must be computed, because it asks for prompt_logprobs."""
        return self.sampling.prompt_logprobs is not None and self.timing.first_token is None

    @property
    def will_be_complete(self) -> bool:
        """Whether the tokens in flight are its last: it stops by length when they come back.

        This is never true of a beam: it waits for the other beams of its search, which may be in
        steps to come.
        """
        return len(self.token_ids) + self.num_sampling >= self.max_total and not (
            self.group is not None and self.group.parks_after_rows
        )

    # Its rows.

    def plan_row(self, num_tokens: int) -> bool:
        """Note a row of known or sampled tokens in the next step; return whether it samples."""
        self.num_computed += num_tokens
        self.num_in_flight += 1
        samples = self.num_computed >= len(self.token_ids)
        if samples:
            self.num_placeholders += 1
            self.num_sampling += 1
        return samples

    def plan_drafts(self, num_drafts: int) -> None:
        """Note that the row just planned may accept this many drafts."""
        self.num_computed += num_drafts
        self.num_placeholders += num_drafts

    def take_sample(self, num_drafts: int, num_accepted: int) -> None:
        """Note that the oldest step that samples is back.

        num_drafts: drafts it was planned with. num_accepted: drafts that it has accepted.
        """
        self.num_sampling -= 1
        self.num_placeholders -= 1
        if num_drafts:
            self.num_placeholders -= num_drafts
            self.num_computed -= num_drafts - num_accepted

    def postpone_sample(self, num_drafts: int) -> None:
        """Take a sample out of the newest step; the next step computes the token again.

        For the workers it is as if the request entered in that next step, with all its known
        tokens.
        """
        self.num_sampling -= 1
        self.num_placeholders -= 1 + num_drafts
        self.num_computed -= 1 + num_drafts
        self.is_new = True

    def finish_of(self, token: int) -> tuple[FinishReason, int | None] | None:
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
    def parks_after_rows(self) -> bool:
        """Whether a member that has had its row is parked until the others have.

        Such a row computes a token that the group has chosen, which the member has not sampled.
        """
        return False

    @property
    def tells_logprobs(self) -> bool:
        """Whether log-probabilities of the members go to their frontend, not to the group."""
        return True

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
            request.parked = True
        self.forks = list(self.sharing(together))
        self.source = together[0] if self.forks else None

    def stop_forking(self) -> None:
        """Note that no member waits for the prompt any more."""
        self.source = None
        self.forks.clear()


def grammars_of(requests: Iterable[Request]) -> list[GrammarState]:
    """Return the grammar of each request; all of them have one."""
    return [request.grammar for request in requests if request.grammar is not None]


def make_record(
    request: Request,
    *,
    waiting_for: WaitReason | None = None,
    finished: float | None = None,
    reason: str | None = None,
) -> RequestRecord:
    """Return what users see of a request."""

    def nanoseconds(time: float | None) -> int | None:
        return None if time is None else int(time * 1e9)

    timing = request.timing
    return RequestRecord(
        request_id=request.request_id,
        client=request.client,
        status=request.status.name.lower(),
        waiting_for=waiting_for,
        num_prompt_tokens=request.num_prompt,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_outputs,
        num_preemptions=request.num_preemptions,
        arrival_ns=int(timing.arrival * 1e9),
        queued_ns=int(timing.queued * 1e9),
        scheduled_ns=nanoseconds(timing.scheduled),
        first_token_ns=nanoseconds(timing.first_token),
        finished_ns=nanoseconds(finished),
        finish_reason=reason,
    )
