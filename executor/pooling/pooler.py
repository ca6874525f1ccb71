"""Pooling: a prompt's vector from the states that the model's last norm gives for its tokens.

A prompt may come in several chunks, and the states of earlier ones are gone. So what they add to
the vector is kept by slot, in float64: the result then does not depend on how a prompt was divided.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.transfer import to_device
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.transport.step import Int64, StepInput
from sidestep.kernels.ops.rms_norm import Stream

_MOST_TOKENS = 1024
"""Tokens whose states are float64 at a time, which bounds the memory."""


class Pooler:
    """The sums of the slots of a rank that has the model's last norm."""

    def __init__(self, spec: ModelSpec, num_slots: int, device: torch.device) -> None:
        """Begin without requests. spec: of a model that pools."""
        assert spec.pooling is not None
        self._type: PoolingType = spec.pooling.pooling
        self._device = device
        # The last token alone is always in the step that ends its prompt.
        kept = 0 if self._type == "last" else num_slots
        self._sums = torch.zeros(kept, spec.hidden_size, dtype=torch.float64, device=device)

    def __repr__(self) -> str:
        return f"Pooler({self._type!r})"

    @property
    def of_last(self) -> bool:
        """Whether the last token of each prompt alone counts."""
        return self._type == "last"

    def tokens(self, batch: HostBatch) -> Int64:
        """Return the indices in T of the tokens whose states the vectors are made of."""
        if self._type == "last":
            return batch.logits_tokens
        if self._type == "cls":
            return np.flatnonzero(batch.positions == 0)
        return np.arange(batch.total_tokens)

    def pool(
        self,
        model: DecoderForCausalLM,
        stream: Stream,
        batch: HostBatch,
        step: StepInput,
        at: Int64 | None = None,
    ) -> Tensor:
        """Return the vectors of the rows that end their prompts, float32 [S, W] on the device.

        stream: what the model's last layer gives for `tokens`. at: the row of the stream that each
        of these has; None if they are its first rows. The step is taken into the sums, so each
        step must be given once.
        """
        tokens = self.tokens(batch)
        rows = None if at is None else to_device(at, self._device)
        if self._type == "last":
            states = (_part(stream, rows, 0, len(tokens)) if len(tokens) else self._sums).float()
            return model.scores(states)
        self._add(stream, rows, batch.row_slots[tokens].astype(np.int64), step)
        ended = batch.slots[batch.sampling_rows].astype(np.int64)
        pooled = self._sums.index_select(0, to_device(ended, self._device))
        if self._type == "mean":
            counts = batch.seq_lens[batch.sampling_rows].astype(np.float64)
            pooled /= to_device(counts, self._device)[:, None]
        return model.scores(pooled.float())

    def _add(self, stream: Stream, rows: Tensor | None, slots: Int64, step: StepInput) -> None:
        """Add the states of tokens to the sums of their slots, which requests enter empty."""
        if len(step.entering):
            entering = step.entering["slot"].astype(np.int64)
            self._sums.index_fill_(0, to_device(entering, self._device), 0.0)
        of_tokens = to_device(slots, self._device)
        for begin in range(0, len(slots), _MOST_TOKENS):
            end = min(begin + _MOST_TOKENS, len(slots))
            states = _part(stream, rows, begin, end)
            self._sums.index_add_(0, of_tokens[begin:end], states.double())


def _part(stream: Stream, rows: Tensor | None, begin: int, end: int) -> Tensor:
    """Return the normed states of some of the tokens, which are at `rows` of the stream."""
    part = stream.part(begin, end) if rows is None else stream.of_rows(rows[begin:end])
    return part.normed()
