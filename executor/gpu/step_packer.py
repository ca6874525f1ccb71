"""A step as one message of 32-bit words in pinned memory, copied to the device in one piece.

It is the only copy from host to device that a step needs. The order of words is that of
kernels.triton.prepare_step_triton.StepLayout. Buffers rotate, so that no buffer is written while
the copy of an earlier step still reads it: there are more buffers than steps in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.ipc.params.ranges import MAX_STOP_TOKEN_IDS
from sidestep.ipc.transport.step import Int32, StepInput
from sidestep.kernels.triton.prepare_step_triton import MASKED, SAMPLING, StepLayout

MASKED_PER_ROW = MAX_STOP_TOKEN_IDS + 32
"""Most stop tokens of a request that has `min_tokens`: its own, and the model's ends of
sequence."""


def message_size(layout: StepLayout, max_blocks: int) -> int:
    """Return the words of the longest message. max_blocks: KV blocks of the longest request."""
    return layout.block_ids + layout.rows * (max_blocks + 2 * MASKED_PER_ROW)


class StepPacker:
    """Packs steps of up to `layout.rows` rows and `layout.tokens` tokens."""

    def __init__(self, layout: StepLayout, max_blocks: int, num_buffers: int) -> None:
        """Allocate the buffers. max_blocks: KV blocks of the longest request."""
        size = message_size(layout, max_blocks)
        self.buffers = [
            torch.empty(size, dtype=torch.int32, pin_memory=torch.cuda.is_available())
            for _ in range(num_buffers)
        ]
        self._words = [buffer.numpy() for buffer in self.buffers]

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

        put("slots", batch.slots)
        put("seq_lens", batch.seq_lens)
        put("query_starts", batch.query_starts, rows + 1)
        put("samples", samples)
        put("num_blocks", state.num_blocks[batch.slots] - step.num_new_blocks)
        at = layout.at("block_starts")
        words[at] = 0
        np.cumsum(step.num_new_blocks, out=words[at + 1 : at + 1 + rows])
        put("enters", np.zeros(rows, np.int32))
        if len(step.entering):
            self._put_entering(words, layout, batch, step)
        words[layout.token_ids : layout.token_ids + batch.total_tokens] = batch.token_ids
        end = layout.block_ids + len(step.block_ids)
        words[layout.block_ids : end] = step.block_ids
        masked_rows, masked_tokens = masked_logits(
            state, batch.slots, batch.seq_lens, on_own_logits
        )
        count = len(masked_rows)
        words[: MASKED + 2] = (rows, batch.num_decode_rows, batch.total_tokens, count, end)
        words[SAMPLING : SAMPLING + 2] = (rows, position)
        if count:
            words[end : end + count] = masked_rows
            words[end + count : end + 2 * count] = masked_tokens
        return end + 2 * count

    def _put_entering(
        self, words: Int32, layout: StepLayout, batch: HostBatch, step: StepInput
    ) -> None:
        """Write the parameters of entering requests, which are in the order of their rows."""
        new = step.entering
        rows = np.flatnonzero(np.isin(batch.slots, new["slot"]))
        seeds = np.ascontiguousarray(new["seed"]).view(np.int32).reshape(-1, 2)
        floats = {
            name: np.ascontiguousarray(new[name]) for name in ("temperature", "top_p", "min_p")
        }
        for name, values in (
            ("enters", np.ones(len(rows), np.int32)),
            *((name, column.view(np.int32)) for name, column in floats.items()),
            ("top_k", new["top_k"]),
            ("seed_low", seeds[:, 0]),
            ("seed_high", seeds[:, 1]),
        ):
            words[layout.at(name) + rows] = values


def masked_logits(
    state: HostTables, slots: Int32, seq_lens: Int32, samples: npt.NDArray[np.bool_] | bool = True
) -> tuple[Int32, Int32]:
    """Return rows and tokens of logits that must not be sampled.

    These are the stop tokens of rows that have too few outputs yet.
    """
    nothing = np.empty(0, np.int32)
    minimum = state.min_tokens[slots]
    if not minimum.any():
        return nothing, nothing
    early = np.flatnonzero((seq_lens - state.num_prompt[slots] < minimum) & samples)
    stops = [state.stop_ids[slot] for slot in slots[early].tolist()]
    return np.repeat(early, [len(s) for s in stops]).astype(np.int32), np.concatenate(
        [nothing, *stops]
    )
