"""Tapes of a model's layers, for steps of few tokens on a CPU; see kernels/native/tape.py."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.layers.gated_delta import RecurrentStep
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.kernels.native.tape import Tape, TapeMemory
from sidestep.kernels.ops.rms_norm import Stream

MOST_TOKENS = 64
"""Largest step that has a tape. In larger ones the time between kernels is small."""

_log = logging.getLogger(__name__)


class _Layers(NamedTuple):
    """The layers' kernels for a number of tokens."""

    tape: Tape
    entering: Tensor
    """[T, D]: the stream before the layers, in the tape's memory."""
    vectors: Tensor | None
    """[T, L * P]: vectors that layers take beside it, in the tape's memory; see token_vectors."""
    leaving: Stream
    """The stream behind them, in the tape's memory too."""


class StepTapes:
    """Runs a model's layers, which it records for each number of tokens when that comes first."""

    def __init__(self, decoder: DecoderForCausalLM, attention: AttentionBackend) -> None:
        """Begin without tapes. They hold for these layers, weights and cache alone."""
        self._decoder, self._attention = decoder, attention
        self._memory = TapeMemory()
        self._by_tokens: dict[int, _Layers] = {}
        self.refused: str | None = None
        """The operation of torch in these layers because of which they have no tapes."""

    def __repr__(self) -> str:
        return f"StepTapes({sorted(self._by_tokens)}, {self._memory!r}, refused={self.refused})"

    def takes(self, num_tokens: int, recurrent: RecurrentStep | None) -> bool:
        """Return whether a step of this many tokens may have a tape.

        recurrent: the states and rows of recurrent layers, if there are any. Rows of many tokens
        are not computed by kernels in C alone.
        """
        if recurrent is not None and recurrent.rows.max_long_rows:
            return False
        return self.refused is None and num_tokens <= MOST_TOKENS

    def states(self, inputs: Tensor, recurrent: RecurrentStep | None) -> Stream:
        """Return the residual stream after the last layer, of all tokens of a step.

        inputs: see DecoderForCausalLM.states. The step has begun in the attention backend, and
        recurrent layers find its rows in the place that is the same for all steps.
        """
        stream = self._decoder.entering(inputs)
        vectors = self._decoder.token_vectors(inputs, stream)
        found = self._by_tokens.get(len(stream.hidden))
        if found is None:
            return self._recorded(stream, vectors, recurrent)
        found.entering.copy_(stream.hidden)
        if found.vectors is not None and vectors is not None:
            found.vectors.copy_(vectors)
        found.tape.play()
        return _copied(found.leaving)

    def _recorded(
        self, stream: Stream, vectors: Tensor | None, recurrent: RecurrentStep | None
    ) -> Stream:
        """Run the layers, and keep their tape."""
        entering = self._kept(stream.hidden)
        own = None if vectors is None else self._kept(vectors)
        tape = Tape(self._memory)
        with tape.recorded():
            leaving = self._decoder.through_layers(
                Stream(entering, stream.norm), self._attention, recurrent=recurrent, own=own
            )
        if tape.other is None:
            self._by_tokens[len(entering)] = _Layers(tape, entering, own, leaving)
        else:
            self.refused = tape.other
            _log.debug("steps are not played from tapes, because of %s", tape.other)
        return _copied(leaving)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return a copy in memory of the tapes."""
        return self._memory.empty(tensor.shape, tensor.dtype).copy_(tensor)


def _copied(leaving: Stream) -> Stream:
    """Return the stream in memory of its own: the next step overwrites the tape's."""
    return Stream(leaving.hidden.clone(), leaving.norm)
