"""The step contract between the core and its workers: one message a step each way, as columns.

Core to workers, `StepInput`: which rows run and how many tokens each, plus only what is new:
requests that enter (once, in full) and KV blocks that were added. A worker keeps the rest, one row
per slot. Workers to core, `StepOutput`: the sampled tokens, in the order of the rows that sampled.

Steps go through the stages of a pipeline one after the other, each stage taking them in the order
of their numbers.

A row samples when this step computes the last token that is known of it. Both sides can tell
without being told: the core by its own count, the worker because `num_computed[slot] + num_tokens
>= prefill_len[slot]`. A sampled token never travels from core to worker: the next step takes it
from the worker's own `last_sampled[slot]`. Only a beam is told its token, since a search chose it
(`forced_slots`).

On the wire: a msgspec header with the counts, then each column as raw little-endian values; all
padded to 8 bytes. Decoded columns are views over the received bytes: read-only, and valid only as
long as those bytes are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

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
}
_PREFIX = struct.Struct("<I")


@dataclass(slots=True)
class Columns:
    """A message of integers and one-dimensional columns; a subclass only declares its fields."""

    def encode(self) -> list[bytes | memoryview]:
        """The message as buffers to be written one after the other."""
        header: list[int] = []
        parts: list[bytes | memoryview] = [b""]
        for name, dtype in _layout(type(self)):
            value = getattr(self, name)
            if dtype is None:
                header.append(value)
                continue
            column = np.ascontiguousarray(value, dtype)
            header.append(len(column))
            if len(column):
                parts.append(column.data.cast("B"))
                if pad := -column.nbytes % 8:
                    parts.append(bytes(pad))
        encoded = msgspec.msgpack.encode(header)
        parts[0] = _PREFIX.pack(len(encoded)) + encoded + bytes(-(_PREFIX.size + len(encoded)) % 8)
        return parts

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """The message, its columns being views over `data`."""
        start = _PREFIX.size
        end = start + _PREFIX.unpack_from(data)[0]
        offset = end + -end % 8
        values: list[Any] = []
        for (_, dtype), value in zip(
            _layout(cls), msgspec.msgpack.decode(data[start:end]), strict=True
        ):
            if dtype is None:
                values.append(value)
                continue
            values.append(
                np.frombuffer(data, dtype, value, offset) if value else np.empty(0, dtype)
            )
            offset += value * dtype.itemsize
            offset += -offset % 8
        return cls(*values)


_Layout = tuple[tuple[str, np.dtype[Any] | None], ...]
_layouts: dict[type[Columns], _Layout] = {}


def _layout(cls: type[Columns]) -> _Layout:
    """Field names and dtypes (None for a plain integer) in wire order."""
    layout = _layouts.get(cls)
    if layout is None:
        layout = _layouts[cls] = tuple((f.name, _DTYPES[str(f.type)]) for f in fields(cls))
    return layout


@dataclass(slots=True)
class StepInput(Columns):
    """One step. Rows (R of them) are in batch order, those of one token first; entries of the
    `new_` columns (N of them) follow the order of their rows. A preempted request enters again like
    a new one, with the tokens it had produced as part of what is known.
    """

    step_id: int
    slots: Int32
    """[R] The slot of each row."""
    num_tokens: Int32
    """[R] Tokens to compute, at least 1."""
    num_new_blocks: Int32
    """[R] How many of `block_ids` are appended to each row's block table before the step runs."""
    block_ids: Int32
    """[sum(num_new_blocks)]"""
    new_slots: Int32
    """[N] Slots whose row starts afresh with this step."""
    new_num_known: Int32
    """[N] Known tokens: the prompt and, after a preemption, the output so far."""
    new_num_prompt: Int32
    """[N] The prompt alone; `min_tokens` counts from here."""
    new_num_computed: Int32
    """[N] Tokens whose KV is already in the cache: a prefix hit, or what a beam has from
    another."""
    new_num_sent: Int32
    """[N] How many of the last known tokens are sent: those that are not in the cache, or all of a
    request that has controls and is no beam, since controls may look at what came before."""
    new_token_ids: Int32
    """[sum(new_num_sent)]"""
    new_temperature: Float32
    new_top_p: Float32
    new_min_p: Float32
    new_top_k: Int32
    """[N] 0 for all tokens."""
    new_seed: Int64
    new_min_tokens: Int32
    new_num_stop_ids: Int32
    """[N] How many of `new_stop_ids` belong to each entry; 0 where `new_min_tokens` is 0."""
    new_stop_ids: Int32
    """Tokens that must not be sampled before `min_tokens` outputs: end-of-sequence and stop
    tokens."""
    new_control_sizes: Int32
    """[N] How many of `new_controls` belong to each entry; 0 for a plain request."""
    new_controls: UInt8
    """[sum(new_control_sizes)] What ipc.controls.encode_controls made."""
    copy_sources: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[C] Blocks that are copied, in all layers, before the step writes any keys and values."""
    copy_targets: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[C] What they are copied to. No block is a source and a target, and none is a target
    twice."""
    forced_slots: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[F] Slots of rows of one token that go on with another token than the one they sampled; in
    the order of rows."""
    forced_tokens: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[F] That token."""
    awaits_masks: int = 0
    """1: the step's tokens are sampled when its StepMasks has come, which is the next message."""
    beat: int = 0
    """When it enters the pipeline. Beats only grow, and some have no step. A row's unknown token
    was sampled by a step that is as many beats back as the pipeline has stages, or more; on a
    single stage, by any step before."""


@dataclass(slots=True)
class StepMasks(Columns):
    """What rows with a grammar may sample in a step that is under way. It depends on the tokens of
    the step before, so it is sent when those are known, while the model computes. Masks repeat, so
    a worker keeps them in a table of StepLimits.num_masks entries, and is sent each once.
    """

    step_id: int
    first_new: int
    """Where in the table new masks go, one after the other."""
    rows: Int32
    """[M] Row indices in the step's batch order, ascending; all of them sample.

    The token of a row with a grammar that is not here will be dropped.
    """
    mask_indices: Int32
    """[M] Index in the table of each row's mask."""
    words: Int32
    """[new * ceil(vocab_size / 32)] Mask by mask, a bit for each token, the lowest first; 1:
    allowed."""


@dataclass(slots=True)
class LogprobColumns(Columns):
    """Log-probabilities of N tokens: of each token itself, then of the most probable ones. A
    message within others.
    """

    keys: Int32
    """[N] Whose the token is. In a StepOutput: the index of its row, among those that sampled or,
    of prompts, among all. In messages.Outputs: the request's handle."""
    positions: Int32
    """[N] The token's place in its prompt; of sampled tokens, which come one at a time, in its
    request."""
    sizes: Int32
    """[N] Entries of each token, at least 1."""
    ranks: Int32
    """[N] How many tokens are more probable, plus 1."""
    token_ids: Int32
    """[sum(sizes)]"""
    logprobs: Float32
    """[sum(sizes)]"""

    def pack(self) -> UInt8:
        """As one column of another message."""
        return np.frombuffer(b"".join(self.encode()), np.uint8)

    @classmethod
    def unpack(cls, column: UInt8 | bytes) -> Self:
        """What pack made; views over it."""
        return cls.decode(column if isinstance(column, bytes) else column.data)

    def of(self, chosen: npt.NDArray[np.bool_], keys: Int32) -> Self:
        """Those of some tokens, [N], under other keys, one for each that is chosen."""
        entries = np.repeat(chosen, self.sizes)
        return type(self)(
            keys,
            self.positions[chosen],
            self.sizes[chosen],
            self.ranks[chosen],
            self.token_ids[entries],
            self.logprobs[entries],
        )


def _no_bytes() -> UInt8:
    return _NO_BYTES


_NO_BYTES = np.empty(0, np.uint8)


@dataclass(slots=True)
class StepOutput(Columns):
    """What a step gave."""

    step_id: int
    start_ns: int
    """When the device began the step, on the monotonic clock that the machine's processes share."""
    end_ns: int
    """When the device ended it."""
    token_ids: Int32
    """[rows that sampled] One token each, in row order."""
    received_ns: int = 0
    """When the rank that answers had the step's message."""
    launched_ns: int = 0
    """When it had queued the step's work on the device."""
    logprobs: UInt8 = field(default_factory=_no_bytes)
    """LogprobColumns of sampled tokens; empty if no row asks."""
    prompt_logprobs: UInt8 = field(default_factory=_no_bytes)
    """LogprobColumns of tokens of prompts."""
