"""Attention by our own Triton kernels: the default on a GPU.

A step of few decodes is one kernel a layer; any other step is two or three. All grids depend on
sizes alone, so that steps can be captured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sidestep.executor.attention.base import (
    AttentionBackend,
    AttentionSetup,
    DeviceRows,
    Norms,
    StepBatch,
)
from sidestep.executor.attention.halves import ATTENDING, Halves, context_that_pays
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.kernels.attention.attention_plan_triton import plan_attention
from sidestep.kernels.attention.common.kv_codes_triton import CodedCache
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_codes import takes_codes
from sidestep.kernels.attention.decode_config import config_of
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.hopper import decode_hopper, prefill_hopper, roped_product
from sidestep.kernels.attention.prefill_attention_triton import prefill_attention, prefill_config
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.gpu import gpu_of
from sidestep.kernels.launch import next_power_of_2
from sidestep.kernels.processor_parts import Parts, split_processors
from sidestep.kernels.unfinished_product import (
    PendingProduct,
    Product,
    finished,
    without_scales,
)

_FEW_ROWS = 16
"""Kernels are compiled for at most this many decodes and for any number of rows, not for each
number."""

_CONVERTS_E4M3 = 89
"""Compute capability times ten of the first GPUs that convert numbers of e4m3 themselves."""


_MOST_DIM = 256
"""Largest size of heads for which rows may have several query tokens. Their state is kept in
registers."""


class _Step(NamedTuple):
    """Plan of a step, which its layers share."""

    batch: StepBatch
    rows: DeviceRows
    scratch: DecodeScratch
    plan: dict[int, tuple[Tensor, Tensor]]
    """By window: the ends of the tiles of decode rows, and of the other rows."""
    works: dict[tuple[int, int], Tensor]
    """By window and cache group, in a step of few decodes: the work of their kernel's programs."""


class TritonAttention(AttentionBackend):
    """Cache layout: for each layer [blocks, 2 KVH, block size, D], the keys' heads first."""

    graph_safe = True

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return why the kernels cannot run on a device, or None if they can."""
        return (
            None
            if gpu_of(device) is not None or triton.knobs.runtime.interpret
            else "it needs a GPU"
        )

    def __init__(self, setup: AttentionSetup) -> None:
        """Allocate the cache. Raises EngineStartError for drafts with heads that are too large."""
        _check(setup)
        shape = self._shape = setup.shape
        self._setup = setup
        self._side = torch.cuda.Stream(setup.device) if setup.device.type == "cuda" else None
        # Not cleared: no kernel reads a slot of the cache that was not written.
        self.cache = setup.open_memory(cleared=False)
        self._layers = [
            _layer_cache(self.cache.of_layer(layer), kept, setup)
            for layer, kept in enumerate(setup.kv_layout.layers)
        ]
        # A layer that reads the keys and values of another one writes none.
        self._written = [
            cache if shape.source(layer) == layer else _without_heads(cache)
            for layer, cache in enumerate(self._layers)
        ]
        self._prefill = prefill_config(
            shape.head_dim, setup.dtype.itemsize, hopper=self._suits_hopper()
        )
        self._tokens = self._prefill.tokens(shape.num_heads // shape.num_kv_heads)
        coded = any(kept.format in ("fp8", "int8") for kept in setup.kv_layout.layers)
        self._scratches = {
            queries: DecodeScratch(
                shape.num_heads,
                shape.num_kv_heads,
                shape.head_dim,
                setup.max_rows,
                setup.device,
                config_of(
                    shape.head_dim,
                    setup.dtype.itemsize,
                    shape.num_heads,
                    shape.num_kv_heads,
                    queries,
                    bytes_of_codes=coded,
                    coded_products=setup.coded_products,
                    experts=setup.experts,
                ),
                queries,
            )
            for queries in setup.queries
        }
        many = next_power_of_2(max(_FEW_ROWS, setup.max_rows))
        self._plans = {
            (window, size): (
                torch.zeros(size, dtype=torch.int32, device=setup.device),
                torch.zeros(size, dtype=torch.int32, device=setup.device),
            )
            for window in set(shape.windows)
            for size in {_FEW_ROWS, many}
        }
        self._sizes = (_FEW_ROWS, many)
        few = self._scratches[1].few if 1 in self._scratches else None
        self._works = {}
        if few is not None and few.takes(_FEW_ROWS, setup.block_size):
            for layer, window in enumerate(shape.windows):
                self._works[window, shape.place(layer).group] = few.new_work(_FEW_ROWS)
        self._step: _Step | None = None
        self._parts = self._parts_of_device()
        if self._parts is not None:
            self._split_scratch = self._scratches[1].on(self._parts[0].processors)
            ends, _ = self._plans[0, many]
            self._split_plans = [
                {0: (torch.zeros_like(ends), torch.zeros_like(ends))} for _ in range(2)
            ]

    def _parts_of_device(self) -> Parts | None:
        """Return the processors of attention and of products if steps may be split, else None."""
        plain = all(isinstance(cache, Tensor) for cache in self._layers)
        caps = any(cap is not None for cap in self._shape.softcaps)
        hopper = 1 in self._scratches and self._scratches[1].hopper is not None
        windows = any(self._shape.windows)
        if self._setup.split_weights is None or not (plain and hopper) or caps or windows:
            return None
        return split_processors(self._setup.device, ATTENDING)

    def _suits_hopper(self) -> bool:
        """Return whether the kernel for Hopper takes the prompts of all layers."""
        shape, dtype = self._shape, self._setup.dtype
        return all(
            isinstance(cache, Tensor)
            and shape.softcap(layer) is None
            and prefill_hopper.takes(cache, dtype, shape.num_heads)
            for layer, cache in enumerate(self._layers)
        )

    def begin_step(self, batch: StepBatch) -> None:
        """Plan the step's attention on the device, for each window."""
        assert batch.rows is not None, "this backend needs rows on the device"
        # Steps with prompts have one form. The cost of looking at the ends of many rows is nothing
        # beside the prompts, and a second form would add two of the kernels that take longest to
        # compile.
        scratch = self._scratches[batch.rows.queries]
        few = batch.rows.max_prompt_rows == 0 and len(batch.rows.slots) <= _FEW_ROWS
        size = self._sizes[0] if few else self._sizes[1]
        plan = {window: self._plans[window, size] for window in set(self._shape.windows)}
        works = self._works_for(batch.rows, scratch)
        self._step = _Step(batch, batch.rows, scratch, plan, works)
        self._plan(self._step)
        for (window, group), work in works.items():
            assert scratch.few is not None
            scratch.few.plan(
                work,
                plan[window][0],
                batch.rows.seq_lens,
                batch.rows.slots,
                batch.rows.block_tables[group],
                self._setup.block_size,
                window,
            )

    def _plan(self, step: _Step, first: int = 0) -> None:
        """Plan a step's attention. first: the first of its rows among those of the header."""
        for window, (decode_ends, prefill_ends) in step.plan.items():
            plan_attention(
                step.rows.seq_lens,
                step.rows.query_starts,
                step.rows.header,
                decode_ends,
                prefill_ends,
                tile=step.scratch.config.tile,
                tokens=self._tokens,
                window=window,
                queries=step.rows.queries,
                first=first,
            )

    def split_context(self, rows: int) -> range | None:
        """Return with how many tokens of context it pays to compute decodes in halves."""
        weights, shape = self._setup.split_weights, self._shape
        if self._parts is None or weights is None:
            return None
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * self._setup.dtype.itemsize
        return context_that_pays(rows, weights, token_bytes)

    def split(self, batch: StepBatch) -> Halves:
        """Plan both halves of a step of decodes."""
        rows, parts = batch.rows, self._parts
        assert rows is not None and rows.max_prompt_rows == 0 and parts is not None
        middle, count = len(rows.slots) // 8 * 4, len(rows.slots)
        steps = []
        for own, plan in zip((range(middle), range(middle, count)), self._split_plans, strict=True):
            part = batch.of_rows(own)
            assert part.rows is not None
            step = _Step(part, part.rows, self._split_scratch, plan, {})
            self._plan(step, own.start)
            steps.append((own, _HalfStep(self, step)))
        return Halves(steps, parts)

    def _works_for(self, rows: DeviceRows, scratch: DecodeScratch) -> dict[tuple[int, int], Tensor]:
        """Return the lists to plan if the step's rows go to the kernel of few rows."""
        few = scratch.few
        if few is None or rows.max_prompt_rows or len(rows.slots) > few.most_rows:
            return {}
        return self._works

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Launch one layer's attention."""
        step = self._step
        assert step is not None, "no step has begun"
        rows = step.rows
        rope = self._rope(layer, norms)
        # Several queries of a row attend to one another's keys, so all keys are written before. But
        # for few rows, codes are written before too: a query attends to them as they are read.
        one_each = rows.max_prompt_rows == 0 and rows.queries == 1
        if one_each and isinstance(qkv, Tensor) and self._writes_as_it_attends(step, layer, rope):
            out = self._room(qkv)
            self._attend_decodes(step, layer, qkv, out, rope, sinks, kv_scales)
            return out
        queries = self._write(step, layer, qkv, rope, kv_scales)
        out = self._room(queries)
        if rows.max_prompt_rows == 0:
            self._attend_decodes(step, layer, queries, out, None, sinks)
        elif rows.max_decode_rows == 0:
            self._attend_prompts(step, layer, queries, out, sinks)
        else:
            self._attend_both(step, layer, queries, out, sinks)
        return out

    def _rope(self, layer: int, norms: Norms | None) -> Rope:
        """Return what is applied to a layer's queries and keys."""
        table = self._setup.rotary[self._shape.table(layer)]
        return Rope(table.cos, table.sin, norms, self._setup.norm_eps)

    def _room(self, queries: Tensor) -> Tensor:
        """Return memory for the attended heads of these tokens."""
        return queries.new_empty(len(queries), self._shape.num_heads * self._shape.head_dim)

    def _write(
        self, step: _Step, layer: int, qkv: Product, rope: Rope, kv_scales: Tensor | None
    ) -> Tensor:
        """Write a layer's keys and values; return the queries, rotated, in the first columns."""
        shape, cache = self._shape, self._written[layer]
        tokens = step.batch.positions, step.batch.slot_mapping[shape.place(layer).group]
        if isinstance(qkv, PendingProduct):
            if isinstance(cache, Tensor) and roped_product.takes(qkv, rope, cache):
                return roped_product.project(qkv, *tokens, rope, cache, shape.num_heads)
            qkv = finished(qkv)
        qkv_rope(qkv, *tokens, rope, cache, shape.num_heads, kv_scales)
        return without_scales(qkv)

    def _writes_as_it_attends(self, step: _Step, layer: int, rope: Rope) -> bool:
        """Return whether the layer's attention takes projections in a step of one query a row."""
        cache, shape, dtype = self._layers[layer], self._shape, self._setup.dtype
        if shape.source(layer) != layer:
            return False
        if len(step.rows.slots) > _FEW_ROWS:
            hopper = step.scratch.hopper is not None and shape.softcap(layer) is None
            plain = isinstance(cache, Tensor) and decode_hopper.takes(cache, dtype)
            heads = shape.num_heads, shape.num_kv_heads
            suits = hopper and plain and decode_hopper.turns(rope, dtype, *heads)
            return suits and step.scratch.config.projections
        if isinstance(cache, Tensor):
            return True
        few = step.scratch.few
        if few is None or (shape.windows[layer], shape.place(layer).group) not in step.works:
            return False
        config = few.config.of(len(step.rows.slots))
        tiles = config.tile, config.num_warps, config.stages
        return takes_codes(cache, dtype, shape.num_heads, *tiles)

    def _attend_both(
        self, step: _Step, layer: int, qkv: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Launch decodes and prompts beside each other.

        Decodes wait for memory, prompts for tensor cores.
        """
        if self._side is None:
            self._attend_decodes(step, layer, qkv, out, None, sinks)
            self._attend_prompts(step, layer, qkv, out, sinks)
            return
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            self._attend_decodes(step, layer, qkv, out, None, sinks)
        self._attend_prompts(step, layer, qkv, out, sinks)
        main.wait_stream(self._side)

    def _attend_decodes(
        self,
        step: _Step,
        layer: int,
        qkv: Tensor,
        out: Tensor,
        rope: Rope | None,
        sinks: Tensor | None,
        kv_scales: Tensor | None = None,
    ) -> None:
        rows, window = step.rows, self._shape.windows[layer]
        group = self._shape.place(layer).group
        decode_attention(
            qkv,
            self._layers[layer],
            rows.block_tables[group],
            rows.slots,
            rows.seq_lens,
            step.plan[window][0],
            out,
            step.scratch,
            num_heads=self._shape.num_heads,
            window=window,
            scale=self._shape.scale(layer),
            softcap=self._shape.softcap(layer),
            sinks=sinks,
            rope=rope,
            queries=rows.queries,
            valid_lens=rows.valid_lens,
            few_work=step.works.get((window, group)) if rope is not None else None,
            kv_scales=kv_scales,
            # A row may share blocks that a prompt of its step fills.
            keys_are_old=rows.max_prompt_rows == 0,
        )

    def _attend_prompts(
        self, step: _Step, layer: int, qkv: Tensor, out: Tensor, sinks: Tensor | None
    ) -> None:
        rows, window = step.rows, self._shape.windows[layer]
        prefill_attention(
            qkv,
            self._layers[layer],
            rows.block_tables[self._shape.place(layer).group],
            rows.slots,
            rows.seq_lens,
            rows.query_starts,
            step.plan[window][1],
            out,
            self._prefill,
            num_heads=self._shape.num_heads,
            max_tokens=qkv.shape[0],
            max_rows=rows.max_prompt_rows,
            window=window,
            scale=self._shape.scale(layer),
            softcap=self._shape.softcap(layer),
            sinks=sinks,
        )


class _HalfStep:
    """A half of a step's rows; see executor/attention/halves.py."""

    def __init__(self, backend: TritonAttention, step: _Step) -> None:
        self._backend, self._step = backend, step

    def write(
        self, layer: int, qkv: Product, norms: Norms | None, kv_scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values; return the queries, and memory for the attended heads."""
        backend = self._backend
        queries = backend._write(self._step, layer, qkv, backend._rope(layer, norms), kv_scales)
        return queries, backend._room(queries)

    def attend(self, layer: int, queries: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """Launch attention."""
        self._backend._attend_decodes(self._step, layer, queries, out, None, sinks)


def _check(setup: AttentionSetup) -> None:
    """Raise EngineStartError for rows of several query tokens with heads that are too large."""
    if max(setup.queries) > 1 and setup.shape.head_dim > _MOST_DIM:
        raise EngineStartError(
            f"speculative_config: is not supported on a GPU with heads of {setup.shape.head_dim} "
            f"values; supported are up to {_MOST_DIM}, or leave it out"
        )


def _without_heads(cache: Tensor | CodedCache) -> Tensor | CodedCache:
    """Return the part of a layer's blocks that has none of its keys and values."""
    if isinstance(cache, Tensor):
        return cache[:, :0]
    return replace(cache, codes=cache.codes[:, :0])


def _layer_cache(memory: Tensor, kept: LayerKv, setup: AttentionSetup) -> Tensor | CodedCache:
    """Return a layer's blocks as the kernels take them. memory: uint8 [blocks, bytes].

    Raises EngineStartError for heads that the kernels do not take as codes.
    """
    heads, page, dim = 2 * kept.num_kv_heads, setup.block_size, kept.head_dim
    if kept.format == "model":
        return memory.view(setup.dtype).unflatten(1, (heads, page, dim))
    if kept.format == "int4" and dim & (dim - 1):
        raise EngineStartError(
            "kv_cache_dtype: int4_per_token_head takes heads whose size is a power of two on a "
            f"GPU, this model's have {dim}; fp8 and int8 take any"
        )
    size, gpu = page * kept.code_bytes, gpu_of(setup.device)
    converts = gpu is not None and gpu.capability >= _CONVERTS_E4M3
    codes = memory[:, :size].unflatten(1, (heads, page, -1))
    numbers = memory[:, size:].view(torch.float16)
    return CodedCache(
        codes.view(torch.int8) if kept.format == "int8" else codes,
        numbers.unflatten(1, (2, heads, page) if kept.format == "int4" else (heads, page)),
        "fp8_bits" if kept.format == "fp8" and not converts else kept.format,
    )
