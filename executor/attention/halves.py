"""Two halves of a step's rows: while one attends, the products of the other are computed.

Attention waits for memory, and products of many rows for the tensor cores. So each has a part of
the processors for itself (NanoFlow, Zhu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from sidestep.executor.attention.base import Attends, Norms, SplitLayer, SplitStep
from sidestep.kernels.launch import on_processors
from sidestep.kernels.ops.rms_norm import Stream
from sidestep.kernels.processor_parts import Parts
from sidestep.kernels.unfinished_product import Product

ATTENDING = 40
"""Processors that attend. They read at nine tenths of the speed of all."""
_LEAST_ROWS = 192
"""Rows from which on a step may be computed in halves."""
_FROM, _ROWS, _UP_TO = 3.6, 200, 2.5
"""With this many bytes of keys and values for each weight of a layer's products halves pay, and
one more for each of this many rows: the products of halves take longer, and attention has to hide
more than that. With more than this many times these bytes, attention takes longer than what it
hides."""


def context_that_pays(rows: int, weights: int, token_bytes: int) -> range | None:
    """Return with how many tokens of context halves pay; see AttentionBackend.split_context.

    weights: of a layer's products. token_bytes: of a token's keys and values in a layer.
    """
    if rows < _LEAST_ROWS:
        return None
    least = (_FROM + rows / _ROWS) * weights / token_bytes
    return range(int(least), int(_UP_TO * least))


class HalfStep(Protocol):
    """The part of a backend that computes the rows of a half."""

    def write(
        self, layer: int, qkv: Product, norms: Norms | None, kv_scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values; return the queries, and memory for the attended heads."""

    def attend(self, layer: int, queries: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Launch attention."""


class _Half(Attends):
    """The attention of a half's rows, on processors of its own."""

    def __init__(self, rows: range, step: HalfStep, stream: torch.cuda.Stream | None) -> None:
        self.rows = rows
        self._step, self._stream = step, stream
        self._done: torch.cuda.Event | None = None
        self._queries: Tensor | None = None
        """Kept until attention has read them."""

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Write keys and values, and launch attention beside what is launched next."""
        queries, out = self._step.write(layer, qkv, norms, kv_scales)
        if self._stream is None:
            self._step.attend(layer, queries, out, sinks)
            return out
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step.attend(layer, queries, out, sinks)
            self._done = torch.cuda.Event()
            self._done.record(self._stream)
        self._queries = queries
        return out

    def wait(self) -> None:
        """Let the current stream wait until the rows have attended."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._done = self._queries = None


class Halves(SplitStep):
    """A step of two halves."""

    def __init__(self, steps: Sequence[tuple[range, HalfStep]], parts: Parts) -> None:
        """Take the rows of both halves. parts: processors of attention, and of products."""
        self._halves = [_Half(rows, step, parts[0].stream) for rows, step in steps]
        self._own = parts[1]

    def through(self, layers: Sequence[SplitLayer], stream: Stream) -> Stream:
        """Return the stream behind all layers."""
        parts = [stream.part(half.rows.start, half.rows.stop) for half in self._halves]
        with self._products():
            attended = [
                layers[0].attend(part, half) for part, half in zip(parts, self._halves, strict=True)
            ]
            for i, layer in enumerate(layers):
                for n, half in enumerate(self._halves):
                    half.wait()
                    parts[n] = layer.finish(parts[n], attended[n])
                    if i + 1 < len(layers):
                        attended[n] = layers[i + 1].attend(parts[n], half)
        return Stream(stream.hidden, parts[0].norm)

    @contextmanager
    def _products(self) -> Iterator[None]:
        """Launch products, within the context, on their own processors."""
        with on_processors(self._own.processors):
            if self._own.stream is None:
                yield
                return
            main = torch.cuda.current_stream()
            self._own.stream.wait_stream(main)
            with torch.cuda.stream(self._own.stream):
                yield
            main.wait_stream(self._own.stream)
