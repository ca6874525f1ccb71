"""The beams of one search: requests that fork and end at every step, by edits of block tables.

All beams have run a step, and stay parked, when the search chooses what follows. A beam's first
continuation goes on in the same request. A second continuation takes over the request of a beam
that has no continuation: it shares the full blocks of the beam it continues, and copies the block
that is not full before the next step writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sidestep.engine_core.groups.beam_search import BeamSearch, Ended
from sidestep.engine_core.groups.group import join
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.candidates import Candidates
from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Decision, Group, Request
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.messages import AddRequest, Beam, FinishReason, pack_ids
from sidestep.ipc.transport.step import LogprobColumns, UInt8


@dataclass(slots=True, eq=False)
class BeamGroup(Group):
    """The requests of one search. The frontend knows the first member. All of them end together."""

    search: BeamSearch = field(kw_only=True)
    beams: list[Request] = field(kw_only=True)
    """Members that are continuations, in the order of the search: one at first, then all."""
    arrived: dict[Request, Candidates] = field(default_factory=dict)
    """Candidates of the beams whose step has come back."""

    @property
    def chooses_tokens(self) -> bool:
        """True: the search chooses, when each beam has its candidates."""
        return True

    @property
    def is_running(self) -> bool:
        """Whether none of them waits."""
        return all(r.status is RequestStatus.RUNNING for r in self.members)

    def ending_with(self, request: Request) -> list[Request]:
        """Return all members, the last one first: the first keeps the place in the queue."""
        return self.members[::-1]

    def sharing(self, together: Sequence[Request]) -> Sequence[Request]:
        """Return the beams that get blocks from the first, which alone computes the prompt."""
        return [r for r in together[1:] if r in self.beams]

    def enter(self, together: Sequence[Request]) -> None:
        """Note that these have got their slots and blocks.

        Preempted beams compute their last token again, so their candidates are dropped.
        """
        super(BeamGroup, self).enter(together)
        for request in together:
            self.arrived.pop(request, None)

    def row_planned(self, request: Request) -> bool:
        """Park a beam until the search has chosen; return True."""
        request.park()
        return True

    def take(self, request: Request, candidates: Candidates) -> Decision | None:
        """Keep the candidates of a beam. After the last beam's, the search advances or ends."""
        self.arrived[request] = candidates
        return self._choose() if len(self.arrived) == len(self.beams) else None

    def _choose(self) -> Decision:
        """Make the beams of the next step. Preempted beams, without blocks, only get tokens."""
        before = self.beams
        chosen = self.search.advance([self.arrived[r] for r in before], self._outputs())
        self.arrived.clear()
        if not chosen:
            return Decision([], is_over=True)
        continued = {before[c.parent] for c in chosen}
        unused = [r for r in self.members if r not in continued]
        self.beams, branches = [], list[tuple[Request, Request]]()
        for parent in (before[c.parent] for c in chosen):
            beam = parent
            if parent in self.beams:
                beam = unused.pop(0)
                beam.fork(parent)
                branches.append((parent, beam))
            self.beams.append(beam)
        for beam, choice in zip(self.beams, chosen, strict=True):
            beam.chosen(choice.token)
        return Decision(branches if self.is_running else [])

    def result(self, eos_ids: frozenset[int]) -> list[Beam]:
        """Return the beams that the frontend gets in the end, or if the search must stop here."""
        return [_told(ended, eos_ids) for ended in self.search.best(self._outputs())]

    def _outputs(self) -> list[list[int]]:
        return [r.token_ids[r.num_prompt :] for r in self.beams]


def _told(ended: Ended, eos_ids: frozenset[int]) -> Beam:
    reason = FinishReason.STOP if ended.token_ids[-1] in eos_ids else FinishReason.LENGTH
    return Beam(
        token_ids=pack_ids(ended.token_ids), logprob=ended.logprob, score=ended.score, reason=reason
    )


def make_beams(
    message: AddRequest,
    params: BeamSearchParams,
    max_model_len: int,
    eos_token_ids: frozenset[int],
    kv: KVCacheManager,
) -> list[Request]:
    """Return the requests of a message that asks for beam search."""
    requests = [
        Request.from_message(message, max_model_len, eos_token_ids)
        for _ in range(params.beam_width)
    ]
    first = requests[0]
    controls = encode_controls(
        Controls(logprobs=params.num_candidates(len(first.eos_ids)), is_beam=True)
    )
    for request in requests:
        request.become_beam(controls, is_first=request is first)
    room = min(first.max_total, kv.longest_of_group(first, len(requests))) - first.num_prompt
    search = BeamSearch(params, first.eos_ids, room)
    join(BeamGroup(requests, first, search=search, beams=[first]), kv)
    return requests


def candidates_of_beams(column: UInt8, rows: Sequence[Request]) -> dict[Request, Candidates]:
    """Return the candidates of the beams among a step's rows that sampled.

    column: StepOutput.logprobs.
    """
    columns = LogprobColumns.unpack(column)
    ends = np.cumsum(columns.sizes).tolist()
    # The candidates are copied, because the columns are views over memory that is reused. The first
    # entry is that of the sampled token.
    return {
        rows[row]: Candidates(
            columns.token_ids[end - size + 1 : end].copy(),
            columns.logprobs[end - size + 1 : end].copy(),
        )
        for row, size, end in zip(columns.keys.tolist(), columns.sizes.tolist(), ends, strict=True)
        if rows[row].is_beam
    }
