"""The step contract between the core and its workers: one message a step each way, as columns.

With a model that pools, a row that would sample gives a vector instead, and its request ends.

Core to workers, `StepInput`: which rows run and how many tokens each, plus only what is new:
requests that enter (once, in full) and KV blocks that were added. A worker keeps the rest, one row
per slot. Workers to core, `StepOutput`: the sampled tokens, in the order of the rows that sampled.

Steps go through the stages of a pipeline one after the other, each stage taking them in the order
of their numbers.

A row samples when this step computes the last token that is known of it. Both sides derive this by
themselves: the core by its own count, the worker because `num_computed[slot] + num_tokens >=
num_known[slot]`. A sampled token never travels from core to worker: the next step takes it from
the worker's own `last_sampled[slot]`. Only a beam gets its token from the core, since a search
chose it (`forced_slots`).

A row that decodes may have several tokens: behind the last sampled token, drafts that the worker
has made for its slot. Every position is sampled as ever, and a draft is accepted while it is the
token that was sampled in its place, so the row gives one token more than it accepts (verification
by sampling). The core plans as if every draft were accepted, reserves blocks for that, and corrects
its counts when the output comes. The worker keeps `num_computed`, `last_sampled` and the drafts of
each slot where it computes, so that the next step can be launched before that.

On the wire: a msgspec header with the counts, then each column as raw little-endian values; all
padded to 8 bytes. Decoded columns are views over the received bytes: read-only, and valid only as
long as those bytes are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from sidestep.ipc.transport.slot_columns import ENTERING, Entering

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

_DTYPES: dict[str, np.dtype[Any] | None] = {
    "int": None,
    "Int32": np.dtype(np.int32),
    "Int64": np.dtype(np.int64),
    "Float32": np.dtype(np.float32),
    "UInt8": np.dtype(np.uint8),
    "Entering": ENTERING,
}
_PREFIX = struct.Struct("<I")


@dataclass(slots=True)
class Columns:
    """A message of integers and one-dimensional columns; a subclass only declares its fields."""

    def encode(self) -> list[bytes | memoryview]:
        """Return the message as buffers to be written one after the other."""
        header: list[int] = []
        parts: list[bytes | memoryview] = [b""]
        for name, dtype, _ in _layout(type(self)):
            value = getattr(self, name)
            if dtype is None:
                header.append(value)
                continue
            header.append(size := len(value))
            if size:  # most columns of most steps are empty
                column = np.ascontiguousarray(value, dtype)
                parts.append(column.view(np.uint8).data)
                if pad := -column.nbytes % 8:
                    parts.append(bytes(pad))
        encoded = msgspec.msgpack.encode(header)
        parts[0] = _PREFIX.pack(len(encoded)) + encoded + bytes(-(_PREFIX.size + len(encoded)) % 8)
        return parts

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Return the message, its columns being views over `data`."""
        start = _PREFIX.size
        end = start + _PREFIX.unpack_from(data)[0]
        offset = end + -end % 8
        values: list[Any] = []
        for (_, dtype, empty), value in zip(
            _layout(cls), msgspec.msgpack.decode(data[start:end]), strict=True
        ):
            if dtype is None:
                values.append(value)
                continue
            if not value:
                values.append(empty)
                continue
            values.append(np.frombuffer(data, dtype, value, offset))
            offset += value * dtype.itemsize
            offset += -offset % 8
        return cls(*values)


_Layout = tuple[tuple[str, np.dtype[Any] | None, npt.NDArray[Any] | None], ...]
"""Name, dtype (None for a plain integer) and an empty column of each field, in wire order."""
_layouts: dict[type[Columns], _Layout] = {}


def _layout(cls: type[Columns]) -> _Layout:
    layout = _layouts.get(cls)
    if layout is None:
        dtypes = [(f.name, _DTYPES[str(f.type)]) for f in fields(cls)]
        layout = _layouts[cls] = tuple(
            (name, dtype, None if dtype is None else np.empty(0, dtype)) for name, dtype in dtypes
        )
    return layout


def _no_bytes() -> UInt8:
    return _NO_BYTES


def _no_ids() -> Int32:
    return _NO_IDS


def _no_floats() -> Float32:
    return _NO_FLOATS


_NO_BYTES, _NO_IDS = np.empty(0, np.uint8), np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


EnteringRow = tuple[int, slice, slice, slice, slice]
"""A request that enters with a step.

It has the slot, the positions of the tokens that are sent, and the request's parts of the columns
`new_token_ids`, `new_stop_ids` and `new_controls`.
"""
_NOTHING = slice(0, 0)


def _parts(sizes: Int32, column: Int32 | UInt8) -> Iterator[slice]:
    """Return the slices of these sizes that follow one another in a column."""
    if not len(column):
        return repeat(_NOTHING, len(sizes))
    ends = list(accumulate(sizes.tolist()))
    return map(slice, chain((0,), ends), ends)


@dataclass(slots=True)
class StepInput(Columns):
    """One step.

    Rows (R of them) are in batch order, those of one token first. The N records of `entering`, and
    the `new_` columns, follow the order of their rows. A preempted request enters again like a new
    one, with the tokens it had produced as part of what is known.
    """

    step_id: int
    slots: Int32
    """[R] The slot of each row."""
    num_tokens: Int32
    """[R] Tokens to compute, at least 1."""
    num_new_blocks: Int32
    """[R] How many of `block_ids` are appended, before the step runs, to each row's block table of
    the group of full attention (ipc/model/cache_groups.py)."""
    block_ids: Int32
    """[sum(num_new_blocks)] Ids of the new blocks, row by row."""
    entering: Entering
    """[N] The records of requests that enter, in the order of their rows; their slots start afresh
    with this step. See ipc/transport/slot_columns.py."""
    new_token_ids: Int32
    """[sum(num_sent)] The tokens that are sent, request by request."""
    new_stop_ids: Int32
    """[sum(num_stop_ids)] Tokens that must not be sampled before `min_tokens` outputs.

    They are end-of-sequence and stop tokens.
    """
    new_controls: UInt8
    """[sum(num_control_bytes)] What logits_controls.encode_controls made."""
    copy_sources: Int32 = field(default_factory=_no_ids)
    """[C] Blocks that are copied, in all layers, before the step writes any keys and values."""
    copy_targets: Int32 = field(default_factory=_no_ids)
    """[C] Blocks that they are copied to. No block is a source and a target, nor a target twice."""
    placed_slots: Int32 = field(default_factory=_no_ids)
    """[P] Slots whose block tables get an entry before the step runs, in a cache group with a
    window."""
    placed_groups: Int32 = field(default_factory=_no_ids)
    """[P] The group of each entry, from 1 on."""
    placed_indices: Int32 = field(default_factory=_no_ids)
    """[P] The entry's place in the table: the index of the block among the request's."""
    placed_blocks: Int32 = field(default_factory=_no_ids)
    """[P] The block's id."""
    state_copy_sources: Int32 = field(default_factory=_no_ids)
    """States of recurrent layers that are copied before the step runs."""
    state_copy_targets: Int32 = field(default_factory=_no_ids)
    """States that they are copied to. No state is a source and a target, nor a target twice."""
    saved_slots: Int32 = field(default_factory=_no_ids)
    """[S] Slots whose rows save the state of recurrent layers."""
    saved_counts: Int32 = field(default_factory=_no_ids)
    """[S] Tokens of the row behind which it is saved, at least 1."""
    saved_states: Int32 = field(default_factory=_no_ids)
    """[S] The state that it is saved in."""
    forced_slots: Int32 = field(default_factory=_no_ids)
    """[F] Slots of rows of one token that compute another token than the one they sampled.

    They are in the order of rows.
    """
    forced_tokens: Int32 = field(default_factory=_no_ids)
    """[F] The token that each of these rows computes."""
    awaits_masks: int = 0
    """1 if the step's tokens are sampled when its StepMasks has come, which is the next message."""
    num_drafts: int = 0
    """Most drafts that each row verifies, behind its token; not 0 only if every row has one token.

    A row computes as many of the drafts that the worker has for its slot, and at most up to the
    slot's `max_total`. So only the worker knows the row's length, until its output is there.
    """
    beat: int = 0
    """Beat in which it enters the pipeline.

    Beats only grow, and some have no step. A row's unknown token was sampled by a step that is at
    least as many beats back as the pipeline has stages; on a single stage, by any step before.
    """

    def entering_rows(self) -> Iterator[EnteringRow]:
        """Return an iterator over the requests that enter, in the order of their rows.

        It yields plain tuples, since the step path has no time for more.
        """
        new = self.entering
        known, sent = new["num_known"], new["num_sent"]
        return zip(
            new["slot"].tolist(),
            map(slice, (known - sent).tolist(), known.tolist()),
            _parts(sent, self.new_token_ids),
            _parts(new["num_stop_ids"], self.new_stop_ids),
            _parts(new["num_control_bytes"], self.new_controls),
            strict=True,
        )


@dataclass(slots=True)
class StepMasks(Columns):
    """The tokens that rows with a grammar may sample in a step that is under way.

    They depend on the tokens of the step before, so the message is sent when those are known, while
    the model computes. Masks repeat, so a worker keeps them in a table of StepLimits.num_masks
    entries, and gets each mask once.
    """

    step_id: int
    first_new: int
    """Index in the table of the first new mask; the others follow it."""
    rows: Int32
    """[M] Row indices in the step's batch order, ascending; all of them sample.

    The token of a row with a grammar that is not here will be dropped.
    """
    mask_indices: Int32
    """[sum(sizes)] Indices in the table of each row's masks: of its token, then behind each of its
    drafts."""
    words: Int32
    """[new * ceil(vocab_size / 32)] New masks one after the other.

    Each has a bit for each token, the lowest first; 1 allows the token.
    """
    sizes: Int32 = field(default_factory=_no_ids)
    """[M] Masks of each row; empty if each row has one."""
    forced_sizes: Int32 = field(default_factory=_no_ids)
    """[M] How many of `forced_ids` belong to each row; empty if none has any."""
    forced_ids: Int32 = field(default_factory=_no_ids)
    """[sum(forced_sizes)] The tokens that the grammar alone decides, from the sampled one on.

    A row that samples the first of them has the next ones as its drafts, in place of others.
    """

    def forced_by_row(self) -> dict[int, Int32]:
        """Return the forced tokens of each row that has any, by the row's index."""
        ends = accumulate(self.forced_sizes.tolist(), initial=0)
        parts = zip(self.rows.tolist(), pairwise(ends), strict=False)
        return {row: self.forced_ids[begin:end] for row, (begin, end) in parts if begin < end}


@dataclass(slots=True)
class LogprobColumns(Columns):
    """Log-probabilities of N tokens: of each token itself, then of the most probable ones.

    It is a message within others.
    """

    keys: Int32
    """[N] The row or request that the token belongs to.

    In a StepOutput it is the index of its row, among the rows that sampled or, for prompts, among
    all. In messages.Outputs it is the request's handle.
    """
    positions: Int32
    """[N] The token's position in its prompt.

    Sampled tokens come one at a time, and theirs is the position in the request.
    """
    sizes: Int32
    """[N] Entries of each token, at least 1."""
    ranks: Int32
    """[N] How many tokens are more probable, plus 1."""
    token_ids: Int32
    """[sum(sizes)] Ids of the tokens, entry by entry."""
    logprobs: Float32
    """[sum(sizes)] Their log-probabilities."""

    def pack(self) -> UInt8:
        """Return it as one column of another message."""
        return np.frombuffer(b"".join(self.encode()), np.uint8)

    @classmethod
    def unpack(cls, column: UInt8 | bytes) -> Self:
        """Return what `pack` made a column of; its columns are views over it."""
        return cls.decode(column if isinstance(column, bytes) else column.data)

    def of(self, chosen: npt.NDArray[np.bool_], keys: Int32) -> Self:
        """Return the entries of the chosen tokens, [N], with a new key for each chosen token."""
        entries = np.repeat(chosen, self.sizes)
        return type(self)(
            keys,
            self.positions[chosen],
            self.sizes[chosen],
            self.ranks[chosen],
            self.token_ids[entries],
            self.logprobs[entries],
        )


@dataclass(slots=True)
class StepOutput(Columns):
    """The output of a step."""

    step_id: int
    start_ns: int
    """Time at which the device began the step, on the monotonic clock that the processes share."""
    end_ns: int
    """Time at which the device ended the step."""
    token_ids: Int32
    """[sum(sizes)] The tokens of the rows that sampled, row by row."""
    received_ns: int = 0
    """Time at which the rank that answers had the step's message."""
    launched_ns: int = 0
    """Time at which that rank had queued the step's work on the device."""
    logprobs: UInt8 = field(default_factory=_no_bytes)
    """LogprobColumns of sampled tokens; empty if no row asks."""
    prompt_logprobs: UInt8 = field(default_factory=_no_bytes)
    """LogprobColumns of tokens of prompts."""
    sizes: Int32 = field(default_factory=_no_ids)
    """[rows that sampled] Tokens of each row, at least 1; empty if each row has one."""
    num_drafts: Int32 = field(default_factory=_no_ids)
    """[rows that sampled] Drafts that each row has verified; empty if none has."""
    num_unverified: int = 0
    """Rows that had a draft and did not verify it, because the step had fewer drafts."""
    num_unverified_right: int = 0
    """Rows among these that sampled the first such draft. It tells whether drafts would pay."""
    next_sizes: Int32 = field(default_factory=_no_ids)
    """[rows that sampled] Drafts that each row's slot has for the next step.

    Empty if no row has a grammar: only the masks of these need to know.
    """
    next_drafts: Int32 = field(default_factory=_no_ids)
    """[sum(next_sizes)] Those drafts."""
    vectors: Float32 = field(default_factory=_no_floats)
    """[rows that sampled * W] With a model that pools: the vector of each row, and no tokens."""

    def by_row(self) -> Iterator[Sequence[int]]:
        """Return an iterator over the tokens of each row that sampled."""
        return _by_row(self.token_ids, self.sizes)

    def next_by_row(self) -> Iterator[Sequence[int]]:
        """Return an iterator over the next drafts of each row that sampled."""
        return _by_row(self.next_drafts, self.next_sizes)


def _by_row(column: Int32, sizes: Int32) -> Iterator[Sequence[int]]:
    values: list[int] = column.tolist()
    if not len(sizes):
        return zip(values, strict=True)
    ends = list(accumulate(sizes.tolist(), initial=0))
    return (values[begin:end] for begin, end in pairwise(ends))
