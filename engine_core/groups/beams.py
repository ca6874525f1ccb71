"""The beams of one search: requests that fork and die at every step, by edits of their block
tables.

All beams have run a step, and stay parked, when the search chooses what follows. A beam that is
continued once goes on in its place. A second continuation takes the place of a beam that is
continued by nothing: it shares the full blocks of the one it continues, and copies the block that
is not full before the next step writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sidestep.engine_core.groups.beam_search import BeamSearch, Candidates, Ended
from sidestep.engine_core.groups.group import join
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.requests.request import Group, Request, RequestStatus
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.transport.messages import AddRequest, Beam, FinishReason, pack_ids
from sidestep.ipc.transport.step import LogprobColumns, UInt8


@dataclass(slots=True, eq=False)
class BeamGroup(Group):
    """The first of `members` is what its frontend knows. All of them end together."""

    search: BeamSearch = field(kw_only=True)
    beams: list[Request] = field(kw_only=True)
    """Members that are continuations, in the order of the search: one at first, then all."""
    arrived: dict[Request, Candidates] = field(default_factory=dict)
    """What may follow those of them whose step has come back."""

    @property
    def parks_after_rows(self) -> bool:
        return True

    @property
    def is_running(self) -> bool:
        """Whether none of them waits."""
        return all(r.status is RequestStatus.RUNNING for r in self.members)

    def sharing(self, together: Sequence[Request]) -> Sequence[Request]:
        """The prompt is computed once, and then continued by all."""
        return [r for r in together[1:] if r in self.beams]

    def enter(self, together: Sequence[Request]) -> None:
        super(BeamGroup, self).enter(together)
        for request in together:  # preempted ones compute their last token again
            self.arrived.pop(request, None)

    def take(self, request: Request, candidates: Candidates) -> bool:
        """Notes what may follow a beam. Whether that is known of all of them now."""
        self.arrived[request] = candidates
        return len(self.arrived) == len(self.beams)

    def advance(self, kv: KVCacheManager) -> bool:
        """Makes the beams of the next step; False if the search is over. Those without blocks
        (preempted) only get their tokens.
        """
        before = self.beams
        chosen = self.search.advance([self.arrived[r] for r in before], self._outputs())
        self.arrived.clear()
        if not chosen:
            return False
        continued = {before[c.parent] for c in chosen}
        places = [r for r in self.members if r not in continued]
        self.beams = []
        for parent in (before[c.parent] for c in chosen):
            if parent not in self.beams:
                self.beams.append(parent)
                continue
            beam = places.pop(0)
            beam.token_ids = parent.token_ids.copy()
            beam.block_hashes = parent.block_hashes.copy()
            if self.is_running:
                kv.branch(parent, beam)
                beam.is_new = True
            self.beams.append(beam)
        for beam, choice in zip(self.beams, chosen, strict=True):
            beam.token_ids.append(choice.token)
            beam.parked = False
        return True

    def result(self, eos_ids: frozenset[int]) -> list[Beam]:
        """What the frontend is told in the end, or if the search must stop here."""
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
    """The requests of a message that asks for beam search."""
    requests = [
        Request.from_message(message, max_model_len, eos_token_ids)
        for _ in range(params.beam_width)
    ]
    first = requests[0]
    controls = encode_controls(
        Controls(logprobs=params.num_candidates(len(first.eos_ids)), is_beam=True)
    )
    for request in requests:
        request.controls, request.has_past_sent = controls, False
    for other in requests[1:]:
        other.was_started = True  # the frontend knows of one
    room = min(first.max_total, kv.longest_of_group(first, len(requests))) - first.num_prompt
    search = BeamSearch(params, first.eos_ids, room)
    join(requests, BeamGroup(requests, search=search, beams=[first]), kv)
    return requests


def found_by(request: Request) -> list[Beam]:
    """What a search has found so far; nothing of a request that is none."""
    return request.group.result(request.eos_ids) if isinstance(request.group, BeamGroup) else []


def candidates_of_beams(column: UInt8, rows: Sequence[Request]) -> dict[Request, Candidates]:
    """What may follow the beams among a step's rows that sampled; column: StepOutput.logprobs."""
    columns = LogprobColumns.unpack(column)
    ends = np.cumsum(columns.sizes).tolist()
    # A copy: the columns are views over memory that is reused. The first entry is of the token that
    # was sampled.
    return {
        rows[row]: Candidates(
            columns.token_ids[end - size + 1 : end].copy(),
            columns.logprobs[end - size + 1 : end].copy(),
        )
        for row, size, end in zip(columns.keys.tolist(), columns.sizes.tolist(), ends, strict=True)
        if isinstance(rows[row].group, BeamGroup)
    }
