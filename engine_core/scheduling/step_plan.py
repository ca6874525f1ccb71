"""A step while it is put together, and the plan that is kept until its output is back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
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
    num_drafts: int = 0
    """Most drafts of each row."""
    num_row_tokens: Sequence[int] = ()
    """Tokens of each row, without drafts."""

    def drafts_of(self, request: Request) -> int:
        """Return the number of drafts that a request's row was planned with."""
        return min(self.num_drafts, request.max_drafts)


@dataclass(slots=True)
class _Rows:
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    new_blocks: list[list[int]] = field(default_factory=list)
    """New blocks of each row."""
    samples: list[bool] = field(default_factory=list)
    forced: list[tuple[int, int]] = field(default_factory=list)
    """(slot, token) of each row that computes a token it has not sampled."""
    entering: list[Request] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)
    """Tokens that need not be computed, for each request of `entering`."""


class StepBuilder:
    """Collects rows in any order; `build` puts rows of one token first, as `StepInput` promises."""

    def __init__(
        self, step_id: int, kv: KVCacheManager, beat: int = 0, num_stages: int = 1
    ) -> None:
        """Begin an empty step.

        beat: the beat in which the step enters a pipeline of `num_stages` stages.
        """
        self._step_id = step_id
        self._beat = beat
        self._next_beat = beat + num_stages
        self._kv = kv
        self._keeps_more = kv.states is not None or bool(kv.groups.windows)
        """Whether the model keeps anything beside the blocks of all tokens."""
        self._saved: list[tuple[int, int, int]] = []
        """(slot, tokens of the row, state)"""
        self._single = _Rows()
        self._chunks = _Rows()
        self._copies: list[tuple[int, int]] = []
        self._placed: list[tuple[int, int, int, int]] = []
        """(slot, group, index, block)"""
        self._has_grammars = False
        self._num_drafts = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self._single.requests and not self._chunks.requests

    def add(self, request: Request, num_tokens: int, blocks: list[int]) -> _Rows:
        """Add the row of a running request, with its new blocks. Advances the request's counts."""
        rows = self._single if num_tokens == 1 else self._chunks
        if self._keeps_more:
            self._keep(request, num_tokens)
        samples = request.plan_row(num_tokens, self._next_beat)
        if samples and request.group is not None:
            is_chosen = request.group.row_planned(request)
            # A request that enters sends its tokens, and a chunk has none that was chosen.
            if is_chosen and num_tokens == 1 and not request.is_new:
                rows.forced.append((request.slot, request.token_ids[-1]))
        if request.grammar is not None:
            self._has_grammars = True
        rows.requests.append(request)
        rows.num_tokens.append(num_tokens)
        rows.new_blocks.append(blocks)
        rows.samples.append(samples)
        return rows

    def enter(self, request: Request, num_tokens: int) -> None:
        """Add the first row of a request that has just got its slot and blocks.

        If the request continues another's block that is not full, the copy of that block is added
        too.
        """
        num_cached = request.num_computed
        held = request.blocks
        self._copies += held.take_copies(num_cached // self._kv.block_size)
        rows = self.add(request, num_tokens, held.ids.copy())
        rows.entering.append(request)
        rows.num_cached.append(num_cached)
        request.entered()

    def rows(self) -> Iterator[tuple[Request, int]]:
        """Yield the request of each row so far, with its number of tokens."""
        for rows in (self._single, self._chunks):
            yield from zip(rows.requests, rows.num_tokens, strict=True)

    def _keep(self, request: Request, num_tokens: int) -> None:
        """Add what a row needs in groups with a window, and the states that it saves."""
        if self._kv.states is not None:
            self._saved += ((request.slot, *one) for one in self._kv.saves(request, num_tokens))
        self._place(request)

    def _place(self, request: Request) -> None:
        """Let the workers know of the request's new blocks in groups with a window."""
        self._placed += ((request.slot, *one) for one in request.blocks.take_unsent())

    @property
    def can_have_drafts(self) -> bool:
        """Whether every row has one token and samples what follows it."""
        return not self._chunks.requests and all(self._single.samples)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return len(self._single.requests) + len(self._chunks.requests)

    def add_drafts(self, num_drafts: int) -> bool:
        """Let each row verify up to this many drafts; `can_have_drafts` must be true.

        Return False, and change nothing, if there are too few free blocks for all rows.
        """
        rows, kv = self._single, self._kv
        size = kv.block_size
        ends = [
            min(r.num_computed + min(num_drafts, r.max_drafts), r.max_total) for r in rows.requests
        ]
        growing = [
            (i, r, end)
            for i, (r, end) in enumerate(zip(rows.requests, ends, strict=True))
            if end > r.blocks.end * size
        ]
        free = kv.pool.num_free
        if sum(max(0, kv.num_missing(r, end) + free) for _, r, end in growing) > free:
            return False
        for i, request, end in growing:
            blocks = kv.grow(request, end)
            assert blocks is not None, "too few blocks, which were counted before"
            rows.new_blocks[i] = rows.new_blocks[i] + blocks
            self._place(request)
        for request in rows.requests:
            request.plan_drafts(min(num_drafts, request.max_drafts))
        self._num_drafts = num_drafts
        return True

    def _state_columns(self) -> dict[str, Any]:
        """Return the parts of a StepInput that speak of states of recurrent layers."""
        assert self._kv.states is not None
        copies = self._kv.states.take_copies()
        return _columns(_SAVED, self._saved) | _columns(_COPIED, copies)

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
                if yes and r.grammar is not None
            ]
            if self._has_grammars
            else []
        )
        blocks, counts = first.new_blocks + then.new_blocks, first.num_tokens + then.num_tokens
        message = StepInput(
            step_id=self._step_id,
            slots=np.array([r.slot for r in rows], np.int32),
            num_tokens=np.array(counts, np.int32),
            num_new_blocks=np.array(list(map(len, blocks)), np.int32),
            block_ids=np.fromiter(chain.from_iterable(blocks), np.int32),
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
            **(_columns(_PLACED, self._placed) if self._placed else {}),
            **(self._state_columns() if self._kv.states is not None else {}),
            awaits_masks=int(bool(masked)),
            num_drafts=self._num_drafts,
            beat=self._beat,
            **(_new_columns(new, first.num_cached + then.num_cached) if new else _NOTHING_NEW),
        )
        num_tokens = len(first.requests) + sum(then.num_tokens)
        num_prompts = len(first.entering) + len(then.requests)
        return message, StepPlan(
            self._step_id,
            self._beat,
            rows,
            sampling,
            num_tokens,
            len(new),
            num_prompts,
            masked,
            num_drafts=self._num_drafts,
            num_row_tokens=counts,
        )


_PLACED = ("placed_slots", "placed_groups", "placed_indices", "placed_blocks")
_SAVED = ("saved_slots", "saved_counts", "saved_states")
_COPIED = ("state_copy_sources", "state_copy_targets")


def _columns(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return parts of a StepInput by name, from the rows of a table."""
    values = np.array(rows, np.int32).reshape(-1, len(names)).T
    return dict(zip(names, values, strict=True))


def _new_columns(new: list[Request], num_cached: list[int]) -> dict[str, Any]:
    """Return the parts of a StepInput that speak of entering requests."""
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
            max_drafts=r.max_drafts,
            state=r.blocks.state,
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
"""These parts when no request enters, which is so for most steps."""
