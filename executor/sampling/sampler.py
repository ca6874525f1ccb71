"""Sampling of a batch on the CPU, where a row pays only for the filters that it asks for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.host_tables import HostTables
from sidestep.ipc.transport.step import Int32, Int64
from sidestep.kernels.ops.sampling import mask_top_k_top_p_min_p, sample


class Sampler:
    """Chooses one token for each row that samples.

    All ranks choose the same token: there is no random state.
    """

    def __init__(self, state: HostTables) -> None:
        self._state = state

    def __call__(self, logits: Tensor, slots: Int32, seq_lens: Int32) -> Tensor:
        """Return int64 [R] from logits [R, V].

        slots: of the rows' requests, [R]. seq_lens: their numbers of tokens, [R].
        """
        state = self._state
        if state.min_tokens[slots].any():
            logits = self._mask_stops(logits, slots, seq_lens)
        temperature = state.temperature[slots]
        if not temperature.any():
            return logits.argmax(-1)
        logits = logits.float()
        filtered = np.flatnonzero(
            (temperature > 0)
            & ((state.top_k[slots] > 0) | (state.top_p[slots] < 1) | (state.min_p[slots] > 0))
        )
        if len(filtered):
            logits = self._filter(logits, filtered, slots[filtered])
        return sample(
            logits,
            _tensor(temperature),
            _tensor(state.seed[slots]),
            _tensor(seq_lens.astype(np.int64)),
        )

    def _mask_stops(self, logits: Tensor, slots: Int32, seq_lens: Int32) -> Tensor:
        """Mask, by -inf, the stop tokens of rows that have fewer than min_tokens outputs."""
        state = self._state
        num_outputs = seq_lens - state.num_prompt[slots]
        early = np.flatnonzero(num_outputs < state.min_tokens[slots])
        if not len(early):
            return logits
        stops = [state.stop_ids[slot] for slot in slots[early].tolist()]
        rows = _tensor(np.repeat(early, [len(s) for s in stops]))
        return logits.index_put(
            (rows, _tensor(np.concatenate(stops).astype(np.int64))), logits.new_tensor(-torch.inf)
        )

    def _filter(self, logits: Tensor, rows: Int64, slots: Int32) -> Tensor:
        state = self._state
        index = _tensor(rows)
        last = state.temperature_last[slots] != 0
        temperature = _tensor(np.where(last, np.float32(1), state.temperature[slots]))[:, None]
        kept = mask_top_k_top_p_min_p(
            logits.index_select(0, index) / temperature,
            _tensor(state.top_k[slots].astype(np.int64)),
            _tensor(state.top_p[slots]),
            _tensor(state.min_p[slots]),
        )
        return logits.index_copy(0, index, kept * temperature)


def _tensor(column: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(column))
