"""Whole steps as CUDA graphs, one for each of a ladder of sizes.

A graph holds the launch of every kernel of a step with fixed sizes and addresses; a smaller step
runs in a larger graph with padding, which costs little because attention and sampling look at the
real numbers on the device. Graphs share one pool of memory: only one runs at a time, and nothing in
it outlives its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.kernels.triton.prepare_step_triton import StepLayout

_MOST_GRAPHED = 2048
"""Tokens up to which the ladder is fine: more graphs would take their time at the start."""
_FINE = 256
_LAUNCH_LAYER_S = 450e-6
_FLOPS = 5e14
"""Seconds that a slow host takes to launch the kernels of a layer with prompts one by one (a fast
one: 130e-6); operations a second of large products."""


@dataclass(frozen=True)
class StepSizes:
    """Padded sizes of a step, and which kinds of rows it may have."""

    rows: int
    tokens: int
    max_decode_rows: int
    max_prompt_rows: int

    @property
    def decode_only(self) -> bool:
        """Whether every row has one token."""
        return self.max_prompt_rows == 0

    def takes(self, rows: int, tokens: int) -> bool:
        """Whether a step fits in, and does not drown in padding: an eighth of it, or what the
        finest ladder has.
        """
        return self.rows >= rows and 0 <= self.tokens - tokens <= max(_FINE, tokens // 8)


@dataclass(frozen=True)
class StepGraph:
    """A captured step."""

    sizes: StepSizes
    layout: StepLayout
    graph: torch.cuda.CUDAGraph


def decode_ladder(max_rows: int) -> list[int]:
    """Batch sizes of decode graphs, the largest last: dense where padding would cost, sparse
    above.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, max_rows, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def mixed_ladder(max_rows: int, max_tokens: int, worthwhile: int) -> list[StepSizes]:
    """Sizes of graphs for steps with prompts, the largest last. max_rows, max_tokens: of any step;
    worthwhile: tokens up to which a graph pays. Where it does for the largest step, that has one
    too: while prompts wait, most steps are as large as they may be.
    """
    most = min(max_tokens, worthwhile, _MOST_GRAPHED)
    tokens = [n for n in (*range(128, 1024, 128), *range(1024, most + 1, _FINE)) if n <= most]
    if max_tokens <= worthwhile and max_tokens not in tokens:
        tokens.append(max_tokens)
    rows = sorted({min(128, max_rows), max_rows})
    return [StepSizes(r, n, r, r) for n in tokens for r in rows if r <= n]


def worthwhile_tokens(spec: ModelSpec) -> int:
    """Up to how many tokens a step with prompts has a graph: as many as the device computes in
    twice the time that the host takes to launch their kernels one by one.
    """
    launches_s = spec.num_layers * _LAUNCH_LAYER_S
    layer = (
        2 * spec.hidden_size * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
        + 3 * spec.hidden_size * spec.intermediate_size
    )
    return int(2 * launches_s * _FLOPS / (2 * spec.num_layers * layer))


class CudaGraphs:
    """Captures steps, and finds the smallest graph that a step fits in."""

    def __init__(self, run: Callable[[StepSizes, StepLayout], object]) -> None:
        """run launches all kernels of a step of some size."""
        self._run = run
        self._pool = torch.cuda.graph_pool_handle()
        self._decode: list[StepGraph] = []
        self._mixed: list[StepGraph] = []

    def __repr__(self) -> str:
        return (
            f"CudaGraphs(decode {[g.sizes.rows for g in self._decode]}, mixed "
            f"{[(g.sizes.rows, g.sizes.tokens) for g in self._mixed]})"
        )

    def capture(self, sizes: StepSizes) -> None:
        """Adds a graph. All kernels it launches must have run before, so that nothing is compiled
        in between.
        """
        layout = StepLayout(sizes.rows, sizes.tokens)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads may call CUDA meanwhile (one waits for an earlier step).
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(sizes, layout)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        graphs = self._decode if sizes.decode_only else self._mixed
        graphs.append(StepGraph(sizes, layout, graph))
        graphs.sort(key=lambda g: (g.sizes.tokens, g.sizes.rows))

    def find(self, rows: int, tokens: int) -> StepGraph | None:
        """The smallest graph for a step; None if there is none that takes it."""
        for graph in self._decode if rows == tokens else self._mixed:
            if graph.sizes.takes(rows, tokens):
                return graph
        return None
