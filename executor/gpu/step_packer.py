"""A step as one message of 32-bit words in pinned memory, copied to the device in one piece.

It is the only copy from host to device that most steps need. The order of words is that of
kernels.triton.prepare_step_triton.StepLayout. Buffers rotate, so that no buffer is written while
the copy of an earlier step still reads it: there are more buffers than steps in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sidestep.executor.recurrent.state_words import StateWords
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.ipc.params.ranges import MAX_STOP_TOKEN_IDS
from sidestep.ipc.transport.slot_columns import DEVICE_WORDS, device_words
from sidestep.ipc.transport.step import Int32, StepInput
from sidestep.kernels.triton.prepare_step_triton import (
    MASKED,
    RECORDS,
    ROWS,
    SAMPLING,
    StepLayout,
)

MASKED_PER_ROW = MAX_STOP_TOKEN_IDS + 32
"""Most stop tokens of a request that has `min_tokens`: its own, and the model's ends of
sequence."""


def message_size(layout: StepLayout, max_blocks: int) -> int:
    """Return the words of the longest message. max_blocks: KV blocks of the longest request."""
    return layout.block_ids + layout.rows * (max_blocks + 3 * MASKED_PER_ROW + DEVICE_WORDS)


class StepPacker:
    """Packs steps of up to `layout.rows` rows and `layout.tokens` tokens."""

    def __init__(
        self,
        layout: StepLayout,
        max_blocks: int,
        num_buffers: int,
        states: StateWords | None = None,
    ) -> None:
        """Allocate the buffers.

        max_blocks: KV blocks of the longest request. states: the words that come before the
        message, in a model with recurrent layers.
        """
        self._states, before = states, 0 if states is None else states.count
        size = before + message_size(layout, max_blocks)
        self.buffers = [
            torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            for _ in range(num_buffers)
        ]
        self._before = [buffer.numpy()[:before] for buffer in self.buffers]
        self._words = [buffer.numpy()[before:] for buffer in self.buffers]

    def pack(
        self,
        position: int,
        layout: StepLayout,
        batch: HostBatch,
        step: StepInput,
        apart: Apart | None = None,
    ) -> int:
        """Write the step to the buffer at index `position`, and return the number of words used.

        `position` is also the index where the step's output goes.
        """
        words, state, rows = self._words[position], batch.state, len(batch.slots)
        samples = on_own_logits = batch.samples
        if apart is not None:
            on_own_logits = samples.copy()
            on_own_logits[apart.special] = False
            samples = on_own_logits.copy()
            samples[apart.masked] = False

        def put(name: str, values: npt.NDArray[np.generic], count: int = rows) -> None:
            words[layout.at(name) : layout.at(name) + count] = values

        queries = 1 + step.num_drafts
        put("slots", batch.slots)
        put("starts", _known_starts(batch))
        put("query_starts", batch.query_starts * queries, rows + 1)
        put("samples", samples)
        put("num_blocks", state.num_blocks[batch.slots] - step.num_new_blocks)
        at = layout.at("block_starts")
        words[at] = 0
        np.cumsum(step.num_new_blocks, out=words[at + 1 : at + 1 + rows])
        put("enters", np.zeros(rows, np.int32))
        words[layout.token_ids : layout.token_ids + batch.total_tokens] = batch.token_ids
        end = layout.block_ids + len(step.block_ids)
        words[layout.block_ids : end] = step.block_ids
        masked = masked_logits(state, batch.slots, batch.seq_lens, on_own_logits)
        count = len(masked[0])
        words[: MASKED + 2] = (
            rows,
            batch.num_decode_rows,
            batch.total_tokens * queries,
            count,
            end,
        )
        words[SAMPLING : SAMPLING + 2] = (rows * queries, position)
        words[ROWS : ROWS + 2] = (rows, position)
        for column in masked if count else ():
            words[end : end + count] = column
            end += count
        words[RECORDS] = end
        end += self._put_entering(words, layout, batch, step, end)
        before = self._before[position]
        if self._states is not None:
            self._states.pack(before, batch, queries)
        return len(before) + end

    def _put_entering(
        self, words: Int32, layout: StepLayout, batch: HostBatch, step: StepInput, at: int
    ) -> int:
        """Write the records of entering requests from word `at` on; return how many words."""
        if not len(step.entering):
            return 0
        slots = step.entering["slot"]
        rows = np.flatnonzero(np.isin(batch.slots, slots))
        words[layout.at("enters") + rows] = np.arange(1, len(rows) + 1)
        records = device_words(batch.state.records[slots])
        words[at : at + records.size] = records.reshape(-1)
        return records.size


def _known_starts(batch: HostBatch) -> Int32:
    """Return the position of each row's first token; -1 if a token was sampled before it.

    Where drafts are verified, only the slot itself then knows the position.
    """
    known = batch.seq_lens <= batch.state.num_known[batch.slots]
    return np.where(known, batch.seq_lens - batch.num_tokens, np.int32(-1))


def masked_logits(
    state: HostTables, slots: Int32, seq_lens: Int32, samples: npt.NDArray[np.bool_] | bool = True
) -> tuple[Int32, Int32, Int32]:
    """Return rows and tokens of logits that must not be sampled, and lengths below which not.

    These are the stop tokens of rows that may have too few outputs yet. seq_lens: the fewest tokens
    that a row may have before the next one.
    """
    nothing = np.empty(0, np.int32)
    minimum = state.min_tokens[slots]
    if not minimum.any():
        return nothing, nothing, nothing
    lengths = state.num_prompt[slots] + minimum
    early = np.flatnonzero((seq_lens < lengths) & (minimum > 0) & samples)
    stops = [state.stop_ids[slot] for slot in slots[early].tolist()]
    sizes = [len(s) for s in stops]
    return (
        np.repeat(early, sizes).astype(np.int32),
        np.concatenate([nothing, *stops]),
        np.repeat(lengths[early], sizes).astype(np.int32),
    )
