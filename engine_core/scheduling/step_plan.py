"""A step while it is put together, and the plan that is kept until its output is back."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from sidestep.engine_core.requests.request import Request
from sidestep.ipc.transport.slot_columns import ENTERING, record_of
from sidestep.ipc.transport.step import StepInput


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step in flight."""

    step_id: int
    beat: int
    rows: list[Request]
    sampling: list[Request]
    """The requests of `rows` that sample a token, in the same order."""
    num_tokens: int
    num_entered: int
    num_prompts: int
    """Rows that are new or have several tokens."""
    masked: list[tuple[int, Request]]
    """The rows whose token a grammar restricts: index in `rows`, and request."""
    late: set[Request] = field(default_factory=set)
    """The requests of `sampling` whose tokens do not count, because their masks came too late."""


@dataclass(slots=True)
class _Rows:
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    """(slot, token) of each row that computes a token it has not sampled."""
    entering: list[Request] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    """Tokens that need not be computed, for each request of `entering`."""


class StepBuilder:
    """Collects rows in any order; `build` puts rows of one token first, as `StepInput` promises."""

    def __init__(self, step_id: int, block_size: int, beat: int = 0, num_stages: int = 1) -> None:
        """Begin an empty step.

        beat: the beat in which the step enters a pipeline of `num_stages` stages.
        """
        self._step_id = step_id
        self._beat = beat
        self._num_stages = num_stages
        self._block_size = block_size
        self._single = _Rows()
        self._chunks = _Rows()
        self._copies: list[tuple[int, int]] = []
        self._has_grammars = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self._single.requests and not self._chunks.requests

    def add(self, request: Request, num_tokens: int, blocks: list[int]) -> _Rows:
        """Add the row of a running request, with its new blocks. Advances the request's counts."""
        rows = self._single if num_tokens == 1 else self._chunks
        request.num_computed += num_tokens
        request.num_in_flight += 1
        samples = request.num_computed >= len(request.token_ids)
        if samples:
            request.num_placeholders += 1
            request.next_beat = self._beat + self._num_stages
        if request.matcher is not None:
            self._has_grammars = True
        rows.requests.append(request)
        rows.num_tokens.append(num_tokens)
        rows.num_blocks.append(len(blocks))
        rows.block_ids += blocks
        rows.samples.append(samples)
        return rows

    def enter(self, request: Request, num_tokens: int) -> None:
        """Add the first row of a request that has just got its slot and blocks.

        If the request continues another's block that is not full, the copy of that block is added
        too.
        """
        num_cached = request.num_computed
        if request.copy_source >= 0:
            self._copies.append(
                (request.copy_source, request.block_ids[num_cached // self._block_size])
            )
            request.copy_source = -1
        rows = self.add(request, num_tokens, request.block_ids)
        rows.entering.append(request)
        rows.num_cached.append(num_cached)
        request.is_new = False
        if request.group is not None and request.group.parks_after_rows:
            request.parked = request.num_placeholders > 0

    def force(self, request: Request) -> None:
        """Let the row added last compute the last known token, which it has not sampled.

        The row has one token.
        """
        self._single.forced.append((request.slot, request.token_ids[-1]))

    @property
    def copied(self) -> list[int]:
        """Blocks that are copied before the step writes anything.

        They are held until the step is put together.
        """
        return [source for source, _ in self._copies]

    def build(self) -> tuple[StepInput, StepPlan]:
        """Return the message for the workers, and the scheduler's own plan of the step."""
        first, then = self._single, self._chunks
        rows = first.requests + then.requests
        samples = first.samples + then.samples
        sampling = (
            rows if all(samples) else [r for r, yes in zip(rows, samples, strict=True) if yes]
        )
        new = first.entering + then.entering
        masked = (
            [
                (i, r)
                for i, (r, yes) in enumerate(zip(rows, samples, strict=True))
                if yes and r.matcher is not None
            ]
            if self._has_grammars
            else []
        )
        message = StepInput(
            step_id=self._step_id,
            slots=np.array([r.slot for r in rows], np.int32),
            num_tokens=np.array(first.num_tokens + then.num_tokens, np.int32),
            num_new_blocks=np.array(first.num_blocks + then.num_blocks, np.int32),
            block_ids=np.array(first.block_ids + then.block_ids, np.int32),
            copy_sources=np.array(self.copied, np.int32) if self._copies else _NONE,
            copy_targets=np.array([target for _, target in self._copies], np.int32)
            if self._copies
            else _NONE,
            forced_slots=np.array([slot for slot, _ in first.forced], np.int32)
            if first.forced
            else _NONE,
            forced_tokens=np.array([token for _, token in first.forced], np.int32)
            if first.forced
            else _NONE,
            awaits_masks=int(bool(masked)),
            beat=self._beat,
            **(_new_columns(new, first.num_cached + then.num_cached) if new else _NOTHING_NEW),
        )
        num_tokens = len(first.requests) + sum(then.num_tokens)
        num_prompts = len(first.entering) + len(then.requests)
        return message, StepPlan(
            self._step_id, self._beat, rows, sampling, num_tokens, len(new), num_prompts, masked
        )


def _new_columns(new: list[Request], num_cached: list[int]) -> dict[str, Any]:
    """Return what a StepInput says of the requests that enter."""
    # Cached tokens are left out: a hit may have a hundred thousand, and a beam forks in most steps.
    sent = [
        r.token_ids if r.has_past_sent else r.token_ids[cached:]
        for r, cached in zip(new, num_cached, strict=True)
    ]
    stops = [sorted(r.stop_ids) if r.sampling.min_tokens > 0 else [] for r in new]
    records = [
        record_of(
            r.sampling,
            slot=r.slot,
            num_known=len(r.token_ids),
            num_prompt=r.num_prompt,
            num_computed=cached,
            num_sent=len(tokens),
            num_stop_ids=len(stop_ids),
            num_control_bytes=len(r.controls),
            max_total=r.max_total,
        )
        for r, cached, tokens, stop_ids in zip(new, num_cached, sent, stops, strict=True)
    ]
    return {
        "entering": np.array(records, ENTERING),
        "new_token_ids": np.fromiter(chain.from_iterable(sent), np.int32),
        "new_stop_ids": np.fromiter(chain.from_iterable(stops), np.int32),
        "new_controls": np.frombuffer(b"".join(r.controls for r in new), np.uint8),
    }


_NONE = np.empty(0, np.int32)
_NOTHING_NEW = _new_columns([], [])
"""What a StepInput says when no request enters, which is so for most steps."""
