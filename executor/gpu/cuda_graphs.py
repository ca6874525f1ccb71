"""Whole steps as CUDA graphs, one for each size of a ladder.

A graph holds the launch of every kernel of a step, with fixed sizes and addresses. A smaller step
runs in a larger graph with padding. The padding costs little, because attention and sampling read
the real numbers of rows and tokens on the device. All graphs share one memory pool: only one graph
runs at a time, and nothing in the pool outlives its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from sidestep.ipc.model.model_size import layers_size
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.speculative_config import tiers_of
from sidestep.ipc.step_limits import StepLimits
from sidestep.kernels.launch_order import checked_order
from sidestep.kernels.triton.prepare_step_triton import StepLayout

_MOST_GRAPHED = 2048
"""Tokens up to which the ladder is fine; more graphs would make the start slower."""
_FINE = 256
"""Tokens between two sizes of the ladder from 1024 tokens on, and padding that any step may
have."""
_LAUNCH_LAYER_S = 450e-6
"""Seconds that a slow host takes to launch the kernels of a layer with prompts one by one (a fast
host: 130e-6)."""
PAD = 128
"""Steps without a graph are padded to a multiple of this many tokens."""
_FLOPS = 5e14
"""Operations a second of large products."""


@dataclass(frozen=True)
class StepSizes:
    """Padded sizes of a step, and the kinds of rows that it may have."""

    rows: int
    tokens: int
    max_decode_rows: int
    max_prompt_rows: int
    queries: int = 1
    """Tokens of each row in a step with drafts; all its rows have the same number."""
    in_parts: bool = False
    """Whether a step of decodes is computed in parts; see AttentionBackend.split_context."""
    has_many_saves: bool = False
    """Whether rows with prompts may save more than FEW_SAVES states of recurrent layers, which no
    graph takes (executor/recurrent/state_words.py)."""

    @property
    def decode_only(self) -> bool:
        """Whether every row has one token."""
        return self.max_prompt_rows == 0

    @property
    def layout(self) -> StepLayout:
        """The smallest layout of a step's message."""
        return StepLayout(self.rows, self.tokens // self.queries)

    def takes(self, rows: int, tokens: int) -> bool:
        """Return whether a step fits in with an acceptable amount of padding.

        Acceptable is an eighth of the step's tokens, or `_FINE` tokens if that is more. With drafts
        any amount is: there are few sizes, and the core measures what they cost.
        """
        if self.queries > 1:
            return self.rows >= rows
        return self.rows >= rows and 0 <= self.tokens - tokens <= max(_FINE, tokens // 8)


@dataclass(frozen=True)
class StepGraph:
    """A captured step."""

    sizes: StepSizes
    layout: StepLayout
    graph: torch.cuda.CUDAGraph


def decode_ladder(max_rows: int) -> list[int]:
    """Return the batch sizes of decode graphs, the largest last.

    The sizes are dense where padding would cost much, and sparse above.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, max_rows, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def draft_sizes(limits: StepLimits) -> list[StepSizes]:
    """Return the sizes of graphs for steps with drafts, for each number of drafts the largest last.

    The batch sizes are sparse: with more rows drafts pay less.
    """
    sizes = []
    for queries in [1 + drafts for drafts in tiers_of(limits.num_drafts) if drafts]:
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens // queries)
        ladder = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < most] + [most] * (most > 0)
        sizes += [StepSizes(n, n * queries, n, 0, queries) for n in ladder]
    return sizes


def most_queries(limits: StepLimits) -> int:
    """Return the most positions of a step that are sampled."""
    return max(limits.max_num_seqs, *(sizes.tokens for sizes in draft_sizes(limits)), 0)


def mixed_ladder(max_rows: int, max_tokens: int, worthwhile: int) -> list[StepSizes]:
    """Return the sizes of graphs for steps with prompts, the largest last.

    max_rows, max_tokens: the limits of any step. worthwhile: tokens up to which a graph pays. If a
    graph pays for the largest step, that step has one too: while prompts wait, most steps are as
    large as they may be.
    """
    most = min(max_tokens, worthwhile, _MOST_GRAPHED)
    tokens = [n for n in (*range(128, 1024, 128), *range(1024, most + 1, _FINE)) if n <= most]
    if max_tokens <= worthwhile and max_tokens not in tokens:
        tokens.append(max_tokens)
    rows = sorted({min(128, max_rows), max_rows})
    return [StepSizes(r, n, r, r) for n in tokens for r in rows if r <= n]


def worthwhile_tokens(spec: ModelSpec) -> int:
    """Return the number of tokens up to which a step with prompts has a graph.

    It is the number of tokens that the device computes in twice the time that the host takes to
    launch the step's kernels one by one.
    """
    launches_s = spec.num_layers * _LAUNCH_LAYER_S
    return int(2 * launches_s * _FLOPS / (2 * layers_size(spec).active))


def eager_sizes(
    limits: StepLimits, rows: int, tokens: int, decodes: int, queries: int
) -> StepSizes:
    """Return the sizes of a step without a graph, padded to few different sizes.

    tokens: without drafts. decodes: rows of one token. For a new size the library of products may
    choose a kernel that it has not loaded yet, which stops the device, and the allocator may have
    to look for memory.
    """
    if queries > 1:
        return next(
            sizes
            for sizes in draft_sizes(limits)
            if sizes.queries == queries and sizes.rows >= rows
        )
    padded = next(size for size in decode_ladder(limits.max_num_seqs) if size >= rows)
    if decodes == tokens:
        return StepSizes(padded, padded, padded, 0)
    padded_tokens = min(-(-tokens // PAD) * PAD, limits.max_num_batched_tokens)
    return StepSizes(padded, padded_tokens, decodes, rows - decodes)


class CudaGraphs:
    """Captures steps, and finds the smallest graph that a step fits in."""

    def __init__(self, run: Callable[[StepSizes, StepLayout], object]) -> None:
        """Start without graphs. run: launches all kernels of a step of given sizes."""
        self._run = run
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: the library of products keeps some memory for each stream.
        self._stream = torch.cuda.Stream()
        self._decode: list[StepGraph] = []
        self._in_parts: dict[int, StepGraph] = {}
        """By the number of rows: graphs of decodes that are computed in parts."""
        self._mixed: list[StepGraph] = []
        self._drafting: dict[int, list[StepGraph]] = {}
        """By the number of queries of a row."""

    def __repr__(self) -> str:
        drafting = [(g.sizes.rows, q) for q, found in self._drafting.items() for g in found]
        return (
            f"CudaGraphs(decode {[g.sizes.rows for g in self._decode]}, mixed "
            f"{[(g.sizes.rows, g.sizes.tokens) for g in self._mixed]}, drafting {drafting})"
        )

    def capture(self, sizes: StepSizes) -> None:
        """Capture a graph of these sizes and add it.

        All kernels that the step launches must have run before, so that nothing is compiled during
        the capture.
        """
        layout = sizes.layout
        graph = torch.cuda.CUDAGraph()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Other threads may call CUDA during the capture (one waits for an earlier step).
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._run(sizes, layout)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        captured = StepGraph(sizes, layout, graph)
        if sizes.in_parts:
            self._in_parts[sizes.rows] = captured
            return
        graphs = self._decode if sizes.decode_only else self._mixed
        if sizes.queries > 1:
            graphs = self._drafting.setdefault(sizes.queries, [])
        graphs.append(captured)
        graphs.sort(key=lambda g: (g.sizes.tokens, g.sizes.rows))

    def find(self, rows: int, tokens: int, queries: int = 1) -> StepGraph | None:
        """Return the smallest graph that a step fits in; None if there is none."""
        graphs = self._decode if rows == tokens else self._mixed
        if queries > 1:
            graphs = self._drafting.get(queries, [])
        return next((graph for graph in graphs if graph.sizes.takes(rows, tokens)), None)

    def in_parts(self, whole: StepGraph) -> StepGraph:
        """Return the graph of a step's parts. It has been captured."""
        return self._in_parts[whole.sizes.rows]


def capture_steps(
    launch: Callable[[StepSizes, StepLayout], object],
    kinds_of_layers: Callable[[], AbstractContextManager[None]],
    decode: Sequence[StepSizes],
    limits: StepLimits,
    spec: ModelSpec,
) -> CudaGraphs:
    """Run each kind of step once, then capture the whole ladder.

    launch: launches all kernels of a step of given sizes. The message on the device has no rows.
    kinds_of_layers: within its context a step has only layers that differ in their kernels. They
    launch whatever all layers launch, in a tenth of the time. decode: steps without drafts.
    """
    graphs = CudaGraphs(launch)
    decode = [*decode, *draft_sizes(limits)]
    mixed = mixed_ladder(
        limits.max_num_seqs, limits.max_num_batched_tokens, worthwhile_tokens(spec)
    )
    with checked_order(), kinds_of_layers():
        for sizes in [*mixed[-1:], *mixed[:1], *decode]:
            launch(sizes, sizes.layout)
    torch.cuda.synchronize()
    # The largest first: the others then fit into the memory it took.
    for sizes in sorted((*mixed, *decode), key=lambda s: -s.tokens):
        graphs.capture(sizes)
    return graphs
