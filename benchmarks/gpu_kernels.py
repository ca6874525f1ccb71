"""How far each kernel of a step is from what the GPU allows: the figures behind the kernels' configurations.

    python benchmarks/gpu_kernels.py [--only decode,gated,prefill,linear,layers,small] [--tune]

Each kernel is checked against a reference in higher precision, then timed in a CUDA graph of many launches over inputs
that take turns and together are larger than the L2 cache. The floor is bytes over the bandwidth of a large read, or
operations over the rate of a large matrix product, both measured first. --tune tries configurations of the kernels that
have them and prints the best; their compilation is spread over processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from sidestep.kernels.decode_attention_triton import (
    DecodeConfig,
    DecodeScratch,
    Rope,
    decode_attention,
    decode_config,
    plan_attention,
)
from sidestep.kernels.gated_gemm_triton import GatedConfig, default_config, gated_gemm
from sidestep.kernels.gated_gemm_triton import choose as choose_gated
from sidestep.kernels.launch import compiling_only
from sidestep.kernels.linear import add_linear, gated_linear, linear
from sidestep.kernels.prefill_attention_triton import PrefillConfig, prefill_attention, prefill_config
from sidestep.kernels.qkv_rope_triton import qkv_rope
from sidestep.kernels.rms_norm import RmsNorm, Stream
from sidestep.kernels.rms_norm_triton import rms_norm
from sidestep.kernels.silu_mul_triton import silu_mul
from sidestep.kernels.skinny_linear_triton import SkinnyConfig, add_skinny_linear, skinny_linear

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
L2_BYTES = 160 << 20
"""Inputs that take turns hold this much together."""

Call = Callable[[], object]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model, and how many layers the benchmark keeps."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    layers: int
    kept: int
    head_dim: int = 128

    def linears(self) -> dict[str, tuple[int, int, bool]]:
        """Outputs, inputs, whether gated, of each matrix."""
        return {"qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden, False),
                "o": (self.hidden, self.heads * self.head_dim, False), "gate_up": (self.inner, self.hidden, True),
                "down": (self.hidden, self.inner, False)}


MODELS = (Model("Qwen3-0.6B", 1024, 16, 8, 3072, 151936, 28, 28),
          Model("Llama-3.1-8B", 4096, 32, 8, 14336, 128256, 32, 8))


class Ceilings:
    """What this GPU reaches: bytes a second of a copy and of a reading sum, operations a second of a product."""

    def __init__(self) -> None:
        a = torch.randn(1 << 30, dtype=DTYPE, device=DEVICE)
        b = torch.empty_like(a)
        self.copy = 4 * a.numel() / microseconds([lambda: torch.neg(a, out=b)] * 2) / 1e6
        wide = a.view(torch.int32).view(1 << 13, -1)
        out = torch.empty(1 << 13, dtype=torch.float32, device=DEVICE)
        values = wide.view(torch.float32)
        self.read = 2 * a.numel() / microseconds([lambda: torch.amax(values, 1, out=out)] * 2) / 1e6
        m = torch.randn(8192, 8192, dtype=DTYPE, device=DEVICE)
        c = torch.empty_like(m)
        self.product = 2 * 8192 ** 3 / microseconds([lambda: torch.mm(m, m, out=c)] * 3) / 1e6

    def floor(self, num_bytes: float, operations: float = 0.0) -> float:
        """Microseconds."""
        return max(num_bytes / max(self.copy, self.read), operations / self.product) / 1e6


def microseconds(calls: Sequence[Call], replays: int = 7) -> float:
    """A call's time within a CUDA graph of all of them: median over the replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def repeated(calls: Sequence[Call], least: int) -> list[Call]:
    """The calls in turn, as often as makes at least so many."""
    return list(calls) * max(1, math.ceil(least / len(calls)))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Infinite where anything is not a number."""
    error = ((out.double() - reference.double()).norm() / reference.double().norm()).item()
    return error if math.isfinite(error) else math.inf


class Paged:
    """A batch over a paged cache, of which there are as many copies as L2 asks for."""

    def __init__(self, model: Model, lengths: Sequence[int], counts: Sequence[int], block_size: int,
                 copies: int) -> None:
        self.model, self.block_size = model, block_size
        rows = len(lengths)
        blocks = [math.ceil(n / block_size) for n in lengths]
        order = torch.randperm(sum(blocks), dtype=torch.int32)
        self.tables = torch.zeros(rows, max(blocks), dtype=torch.int32)
        at = 0
        for row, n in enumerate(blocks):
            self.tables[row, :n] = order[at:at + n]
            at += n
        self.tables = self.tables.to(DEVICE)
        shape = (sum(blocks), 2 * model.kv_heads, block_size, model.head_dim)
        self.caches = [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
        self.lengths, self.counts = list(lengths), list(counts)
        self.slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        starts = [0, *itertools.accumulate(counts)]
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        decodes = rows if max(counts) == 1 else 0
        self.header = torch.tensor([rows, decodes, starts[-1]], dtype=torch.int32, device=DEVICE)
        padded = 1 << (rows - 1).bit_length()
        self.decode_ends = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
        self.prefill_ends = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(starts[-1], model.heads * model.head_dim, dtype=DTYPE, device=DEVICE)
        self.out = torch.full_like(self.q, math.nan)

    def plan(self, tile: int, tokens: int) -> None:
        """Counts the tiles, and is done before anything else starts."""
        plan_attention(self.seq_lens, self.query_starts, self.header, self.decode_ends, self.prefill_ends, tile=tile,
                       tokens=tokens, window=0)
        torch.cuda.synchronize()

    def keys_values(self, row: int) -> tuple[Tensor, Tensor]:
        """Of the first copy: [KVH, length, D] each."""
        table = self.tables[row, :math.ceil(self.lengths[row] / self.block_size)].long()
        both = self.caches[0][table].transpose(0, 1).flatten(1, 2)[:, :self.lengths[row]]
        return both[:self.model.kv_heads], both[self.model.kv_heads:]

    def error(self, rows: Iterable[int]) -> float:
        """The largest relative error of these rows, the reference in float64; long prompts by their last 64 tokens."""
        worst, starts, m = 0.0, self.query_starts.tolist(), self.model
        for row in rows:
            keys, values = self.keys_values(row)
            first = max(starts[row], starts[row + 1] - 64)
            shape = (-1, m.kv_heads, m.heads // m.kv_heads, m.head_dim)
            q = self.q[first:starts[row + 1]].view(shape).double()
            length, n = self.lengths[row], q.shape[0]
            scores = torch.einsum("nkgd,kld->kgnl", q, keys.double()) * m.head_dim ** -0.5
            positions = torch.arange(length - n, length, device=DEVICE)
            hidden = torch.arange(length, device=DEVICE)[None] > positions[:, None]
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            reference = torch.einsum("kgnl,kld->nkgd", weights, values.double())
            worst = max(worst, relative_error(self.out[first:starts[row + 1]].view(shape), reference))
        return worst


class Decode:
    """Decode attention of one batch."""

    def __init__(self, model: Model, lengths: Sequence[int], block_size: int = 64, copies: int = 0) -> None:
        self.bytes = sum(lengths) * 2 * model.kv_heads * model.head_dim * 2
        copies = copies or math.ceil(L2_BYTES / self.bytes)
        self.batch = Paged(model, lengths, [1] * len(lengths), block_size, copies)
        self.model = model

    def calls(self, config: DecodeConfig) -> list[Call]:
        """One a copy of the cache."""
        m, b = self.model, self.batch
        scratch = DecodeScratch(m.heads, m.kv_heads, m.head_dim, len(b.lengths), DEVICE, config)
        b.plan(config.tile, 16)

        def call(cache: Tensor) -> None:
            decode_attention(b.q, cache, b.tables, b.slots, b.seq_lens, b.decode_ends, b.out, scratch,
                             num_heads=m.heads, window=0, scale=m.head_dim ** -0.5)
        return [lambda cache=cache: call(cache) for cache in b.caches]

    def time(self, config: DecodeConfig) -> float:
        """Microseconds, or infinite if the result is wrong."""
        calls = self.calls(config)
        self.batch.out.fill_(math.nan)
        calls[0]()
        rows = len(self.batch.lengths)
        error = self.batch.error(sorted({0, rows - 1, rows // 2, rows // 3}))
        if error > 1e-2:
            print(f"wrong: {config} error {error}")
            return math.inf
        return microseconds(repeated(calls, 40 if self.bytes < 1 << 28 else 6))

    def library(self) -> float:
        """Torch's attention over contiguous keys and values of equal lengths."""
        m, rows, length = self.model, len(self.batch.lengths), self.batch.lengths[0]
        shape = (rows, m.kv_heads, length, m.head_dim)
        q = self.batch.q.view(rows, m.heads, 1, m.head_dim)
        copies = min(len(self.batch.caches), 40)
        pairs = [(torch.randn(shape, dtype=DTYPE, device=DEVICE), torch.randn(shape, dtype=DTYPE, device=DEVICE))
                 for _ in range(copies)]
        calls: list[Call] = [lambda k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                             for k, v in pairs]
        return microseconds(repeated(calls, 6))


class Prefill:
    """Causal attention of whole prompts."""

    def __init__(self, model: Model, lengths: Sequence[int], block_size: int = 64) -> None:
        self.operations = sum(4 * model.heads * model.head_dim * n * (n + 1) / 2 for n in lengths)
        self.batch = Paged(model, lengths, lengths, block_size, 2)
        self.model = model

    def calls(self, config: PrefillConfig) -> list[Call]:
        """One a copy of the cache."""
        m, b = self.model, self.batch
        b.plan(64, config.tokens(m.heads // m.kv_heads))

        def call(cache: Tensor) -> None:
            prefill_attention(b.q, cache, b.tables, b.slots, b.seq_lens, b.query_starts, b.prefill_ends, b.out, config,
                              num_heads=m.heads, max_tokens=b.q.shape[0], max_rows=len(b.lengths), window=0,
                              scale=m.head_dim ** -0.5)
        return [lambda cache=cache: call(cache) for cache in b.caches]

    def time(self, config: PrefillConfig) -> float:
        """Microseconds, or infinite if the result is wrong."""
        calls = self.calls(config)
        self.batch.out.fill_(math.nan)
        calls[0]()
        error = self.batch.error({0, len(self.batch.lengths) - 1})
        if error > 1e-2 or not bool(self.batch.out.isfinite().all()):
            print(f"wrong: {config} error {error}")
            return math.inf
        return microseconds(repeated(calls, 4), 5)

    def library(self) -> float:
        """Torch's attention over contiguous keys and values."""
        m, rows, length = self.model, len(self.batch.lengths), self.batch.lengths[0]
        q = torch.randn(rows, m.heads, length, m.head_dim, dtype=DTYPE, device=DEVICE)
        k, v = torch.randn(2, rows, m.kv_heads, length, m.head_dim, dtype=DTYPE, device=DEVICE)
        return microseconds([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)] * 4, 5)


def check_linear(outputs: int, inputs: int, gated: bool, rows: int, config: SkinnyConfig | None) -> float:
    """Relative error on fresh inputs."""
    x = torch.randn(rows, inputs, dtype=DTYPE, device=DEVICE)
    weight = torch.randn(outputs * (1 + gated), inputs, dtype=DTYPE, device=DEVICE) * inputs ** -0.5
    reference = x.double() @ weight[:4096 if not gated else None].double().t()
    if gated:
        gate, up = reference.chunk(2, -1)
        reference = F.silu(gate) * up
    return relative_error(skinny_linear(x, weight, gated=gated, config=config)[:, :reference.shape[1]], reference)


class Linear:
    """A matrix, of which there are as many as L2 asks for, times a few rows."""

    def __init__(self, outputs: int, inputs: int, gated: bool, rows: int) -> None:
        self.shape = (outputs, inputs, gated, rows)
        self.bytes = outputs * (1 + gated) * inputs * 2
        copies = max(2, math.ceil(2 * L2_BYTES / self.bytes))
        self.weights = [torch.randn(outputs * (1 + gated), inputs, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
        self.x = torch.randn(rows, inputs, dtype=DTYPE, device=DEVICE)

    def time(self, config: SkinnyConfig | None = None) -> float:
        """Microseconds, or infinite if the result is wrong."""
        if (error := check_linear(*self.shape, config)) > 1e-2:
            print(f"wrong: {self.shape} {config} error {error}")
            return math.inf
        gated = self.shape[2]
        calls: list[Call] = [lambda w=w: skinny_linear(self.x, w, gated=gated, config=config) for w in self.weights]
        return microseconds(repeated(calls, 20))

    def library(self) -> float:
        """torch.nn.functional.linear, and the gated activation after it."""
        gated = self.shape[2]
        calls: list[Call] = [lambda w=w: silu_mul(F.linear(self.x, w)) if gated else F.linear(self.x, w)
                             for w in self.weights]
        return microseconds(repeated(calls, 20))


class Gated(Linear):
    """The gated product of many rows, with the activation."""

    def __init__(self, model: Model, rows: int) -> None:
        super().__init__(model.inner, model.hidden, True, rows)
        self.operations = 4 * rows * model.inner * model.hidden
        self.chosen = choose_gated(rows, model.inner, model.hidden, DEVICE) or default_config(rows)

    def error(self, config: GatedConfig) -> float:
        """Relative, of columns of every tile, in float64; infinite if a second run differs."""
        weight = self.weights[0]
        out = gated_gemm(self.x, weight, config=config)
        if not torch.equal(out, gated_gemm(self.x, weight, config=config)):
            return math.inf
        gate, up = (self.x.double() @ half[::29].double().t() for half in weight.chunk(2))
        return relative_error(out[:, ::29], F.silu(gate) * up)

    def took(self, config: GatedConfig) -> float:
        """Microseconds, or infinite if the result is wrong."""
        if (error := self.error(config)) > 1e-2:
            print(f"wrong: {self.shape} {config} error {error}")
            return math.inf
        return microseconds(repeated([lambda w=w: gated_gemm(self.x, w, config=config) for w in self.weights], 20))


Configs = dict[str, SkinnyConfig | None]


class Layers:
    """The decode step of a model's layers, without its embedding and its head."""

    def __init__(self, model: Model, rows: int, context: int, decode: DecodeConfig | None = None) -> None:
        self.model, self.rows = model, rows
        self.paged = Paged(model, [context] * rows, [1] * rows, 64, model.kept)
        self.weights = [{name: torch.randn(n * (1 + gated), k, dtype=DTYPE, device=DEVICE) * k ** -0.5
                         for name, (n, k, gated) in model.linears().items()} for _ in range(model.kept)]
        self.norm = RmsNorm(torch.ones(model.hidden, dtype=DTYPE, device=DEVICE), 1e-6)
        head_norm = torch.ones(model.head_dim, dtype=DTYPE, device=DEVICE)
        cos, sin = torch.randn(2, context, model.head_dim // 2, device=DEVICE).sign()
        self.rope = Rope(cos, sin, (head_norm, head_norm) if model is MODELS[0] else None, 1e-6)
        self.x = torch.randn(rows, model.hidden, dtype=DTYPE, device=DEVICE)
        self._before: dict[str, Any] = {}
        self.set_decode(decode or decode_config(model.head_dim, 2, model.heads))

    def set_decode(self, config: DecodeConfig) -> None:
        """Takes another configuration of decode attention."""
        m = self.model
        self.scratch = DecodeScratch(m.heads, m.kv_heads, m.head_dim, self.rows, DEVICE, config)
        self.paged.plan(config.tile, 16)

    def bytes(self) -> dict[str, int]:
        """What each kernel of a layer reads: weights, or keys and values."""
        m = self.model
        weights = {name: n * (1 + gated) * k * 2 for name, (n, k, gated) in m.linears().items()}
        return {**weights, "attention": sum(self.paged.lengths) * 2 * m.kv_heads * m.head_dim * 2}

    def run(self, configs: Configs, skip: str = "") -> Tensor:
        """All layers; `configs` by matrix, None for the library's product, as shipped where none is named; `skip` names
        what is left out."""
        stream = Stream(self.x.clone(), self.norm)
        for weights, cache in zip(self.weights, self.paged.caches, strict=True):
            qkv = self._made("qkv", skip, lambda s=stream, w=weights: self._project(s, w, "qkv", configs))
            out = self._made("attention", skip, lambda q=qkv, c=cache: self._attend(q, c))
            stream = self._made("o", skip, lambda s=stream, o=out, w=weights: self._add(s, o, w, "o", configs))
            act = self._made("gate_up", skip, lambda s=stream, w=weights: self._project(s, w, "gate_up", configs))
            stream = self._made("down", skip, lambda s=stream, a=act, w=weights: self._add(s, a, w, "down", configs))
        return stream.hidden

    def _made(self, name: str, skip: str, make: Callable[[], T]) -> T:
        """What a part makes, or, if it is left out, what it made before."""
        if name != skip:
            self._before[name] = make()
        return self._before[name]

    def _attend(self, qkv: Tensor, cache: Tensor) -> Tensor:
        m, b = self.model, self.paged
        out = qkv.new_empty(self.rows, m.heads * m.head_dim)
        decode_attention(qkv, cache, b.tables, b.slots, b.seq_lens, b.decode_ends, out, self.scratch,
                         num_heads=m.heads, window=0, scale=m.head_dim ** -0.5, rope=self.rope)
        return out

    def _project(self, stream: Stream, weights: dict[str, Tensor], name: str, configs: Configs) -> Tensor:
        """A product of the normed stream."""
        weight, gated = weights[name], name == "gate_up"
        if name not in configs:
            return (gated_linear if gated else linear)(stream, weight, None)
        if (config := configs[name]) is not None:
            return skinny_linear(stream, weight, gated=gated, config=config)
        y = F.linear(stream.normed(), weight)
        return silu_mul(y) if gated else y

    def _add(self, stream: Stream, x: Tensor, weights: dict[str, Tensor], name: str, configs: Configs) -> Stream:
        """A product added to the stream."""
        hidden, weight = stream.hidden, weights[name]
        if name not in configs:
            begun = add_linear(hidden, x, weight, None, self.norm)
        elif (config := configs[name]) is not None:
            begun = add_skinny_linear(hidden, x, weight, norm=self.norm, config=config)
        else:
            hidden.addmm_(x, weight.t())
            begun = None
        return Stream(hidden, self.norm, begun)

    def time(self, configs: Configs, skip: str = "") -> float:
        """Microseconds a layer."""
        return microseconds([lambda: self.run(configs, skip)] * 2) / self.model.kept

    def agrees(self, configs: Configs) -> bool:
        """Whether a captured run, its kernels overlapping, equals one in which each ends before the next begins."""
        stream = torch.cuda.current_stream()
        alone = self._alone(configs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.run(configs)
        same = True
        for _ in range(20):
            graph.replay()
            stream.synchronize()
            same = same and torch.equal(captured, alone)
        return same

    def _alone(self, configs: Configs) -> Tensor:
        names = ("linear", "gated_linear", "add_linear", "skinny_linear", "add_skinny_linear", "decode_attention")
        originals = {name: globals()[name] for name in names}

        def separated(function: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                result = function(*args, **kwargs)
                torch.cuda.synchronize()
                return result
            return call

        globals().update({name: separated(function) for name, function in originals.items()})
        try:
            return self.run(configs)
        finally:
            globals().update(originals)


# What --tune tries. -------------------------------------------------------------------------------------------------

TUNED_ROWS = (1, 8, 16)
"""One of each class that kernels.tuned_products tells apart."""


def decode_configs() -> Iterator[DecodeConfig]:
    """Tiles of 32 keys and of 64."""
    for min_tiles in (1, 2, 4, 6):
        yield DecodeConfig(min_tiles=min_tiles)
    yield DecodeConfig(tile=16, num_warps=1, programs_per_processor=8, min_tiles=4)
    yield DecodeConfig(tile=64, num_warps=4, num_stages=2, programs_per_processor=3)


def prefill_configs() -> Iterator[PrefillConfig]:
    """The larger tiles, with bulk copies and without."""
    for rows, keys, warps, stages, registers in ((64, 64, 4, 3, None), (64, 64, 4, 2, None), (64, 64, 4, 3, 160),
                                                 (128, 64, 8, 2, 128), (64, 64, 4, 4, None), (64, 64, 4, 2, 160)):
        yield PrefillConfig(rows, keys, warps, stages, True, registers)
    yield PrefillConfig(64, 64, 4, 3, False)


def gemv_configs(inputs: int) -> Iterator[SkinnyConfig]:
    """For one row."""
    for block_n, block_k, warps in ((1, 512, 2), (1, 1024, 4), (1, 2048, 4), (1, 4096, 8), (2, 1024, 4), (2, 2048, 8),
                                    (4, 512, 4), (8, 512, 8)):
        if block_k < 2 * inputs:
            yield SkinnyConfig(block_n, block_k, warps, False)


def skinny_configs() -> Iterator[SkinnyConfig]:
    """For 2 to 16 rows."""
    for block_n, block_k, warps in ((16, 512, 4), (16, 1024, 4), (16, 1024, 8), (16, 2048, 8), (32, 512, 4)):
        yield SkinnyConfig(block_n, block_k, warps)


def product_configs(inputs: int, rows: int) -> list[SkinnyConfig]:
    """For a matrix with so many inputs."""
    return list(gemv_configs(inputs) if rows == 1 else skinny_configs())


NORM_BEGUN_BY = {"qkv": "down", "gate_up": "o"}
"""The matrices of a normed stream: their kernels differ by how many programs the product before them has."""


def layer_configs(model: Model, rows: int) -> Iterator[Configs]:
    """All that tuning a layer may come to, as far as kernels differ."""
    linears = model.linears()
    for name, (_, k, _) in linears.items():
        before: list[Configs] = [{}]
        if (beginner := NORM_BEGUN_BY.get(name)) is not None:
            by_block = {c.block_n: c for c in product_configs(linears[beginner][1], rows)}
            before = [{beginner: None}, *({beginner: c} for c in by_block.values())]
        for others, product in itertools.product(before, product_configs(k, rows)):
            yield {**others, name: product}


GATED_ROWS = (32, 64, 128, 256, 512, 1024, 2048, 8192)
_GATED_TILES = {
    # rows, columns of each half, step, warps, stages, programs
    64: ((64, 64, 64, 4, 4, 2), (64, 128, 64, 4, 4), (64, 128, 64, 4, 5), (64, 64, 128, 4, 4), (64, 32, 64, 4, 4, 3)),
    128: ((128, 128, 64, 8, 4), (128, 64, 64, 4, 3, 2), (64, 128, 64, 4, 5), (64, 64, 64, 4, 4, 2), (128, 64, 64, 8, 6),
          (128, 32, 64, 8, 4, 2)),
    8192: ((256, 64, 64, 8, 4), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 64, 64, 4, 3, 2),
           (64, 64, 64, 4, 4, 2))}


def gated_configs(rows: int) -> list[GatedConfig]:
    """What may be best for so many rows."""
    by_rows = next(tiles for most, tiles in _GATED_TILES.items() if rows <= most)
    return [GatedConfig(*tile) for tile in by_rows]


def compile_gated(model: Model, rows: int, config: GatedConfig) -> None:
    """Runs nothing."""
    x, weight = (torch.empty(n, model.hidden, dtype=DTYPE, device=DEVICE) for n in (rows, 2 * model.inner))
    with compiling_only(1):
        gated_gemm(x, weight, config=config)


@functools.lru_cache
def _one_layer(model: Model, rows: int) -> Layers:
    return Layers(dataclasses.replace(model, kept=1), rows, 65)


def _compilations(sections: set[str]) -> Iterator[Call]:
    """A call for each kernel that --tune will launch."""
    for model in MODELS:
        if "decode" in sections and model is MODELS[0]:
            for config, rows in itertools.product(decode_configs(), (1, 8, 64, 256)):
                yield lambda m=model, c=config, r=rows: Decode(m, [65] * r, copies=1).calls(c)[0]()
        if "prefill" in sections:
            for config in prefill_configs():
                for lengths in ([8192], [512] * 16):
                    yield lambda m=model, c=config, n=lengths: Prefill(m, n).calls(c)[0]()
        for rows in GATED_ROWS[1:] if "gated" in sections else ():  # the first are as the second
            for gated in gated_configs(rows):
                yield lambda m=model, r=rows, c=gated: compile_gated(m, r, c)
        for rows in TUNED_ROWS if "layers" in sections else ():
            for config in decode_configs():
                yield lambda m=model, r=rows, c=config: (_one_layer(m, r).set_decode(c), _one_layer(m, r).run({}))
            for configs in layer_configs(model, rows):
                yield lambda m=model, r=rows, c=configs: _one_layer(m, r).run(c)
            for product in product_configs(model.hidden, rows):
                yield lambda m=model, r=rows, c=product: check_linear(m.vocab, m.hidden, False, r, c)


def _compile(index: int, of: int, sections: set[str]) -> None:
    torch.cuda.set_device(0)
    for call in itertools.islice(_compilations(sections), index, None, of):
        try:
            call()
        except (OutOfResources, RuntimeError) as error:
            print(f"  {type(error).__name__}: {str(error)[:120]}")


def compile_all(sections: set[str]) -> None:
    """Fills Triton's cache from several processes."""
    begin, number = time.perf_counter(), max(1, (os.cpu_count() or 2) - 1)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_compile, args=(i, number, sections)) for i in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled in {time.perf_counter() - begin:.0f} s")


# The sections. ------------------------------------------------------------------------------------------------------

class Table:
    """Lines for the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Keeps and prints a line."""
        self.lines.append(line)
        print(line)


def attempt(function: Callable[[], float]) -> float:
    """Infinite where a configuration does not fit the GPU or the library has no kernel."""
    try:
        return function()
    except (OutOfResources, RuntimeError) as error:
        print(f"  {type(error).__name__}: {str(error)[:120]}")
        return math.inf


def ragged(rows: int) -> list[int]:
    """Lengths from 100 to 2048, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(100, 2049, (rows,), generator=generator).tolist()


def decode_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Decode attention, by batch and length."""
    table.add("decode attention, us: floor, kernel (floor's share), torch")
    for model in MODELS[:1 if tune else 2]:
        cases = {"64 x 1k": [1024] * 64, "64 x 4k": [4096] * 64, "64 x 16k": [16384] * 64, "1 x 768": [768],
                 "8 x 768": [768] * 8, "256 x 1k": [1024] * 256, "256 ragged": ragged(256)}
        for name, lengths in cases.items():
            for block_size in ((16, 32, 64, 128) if name in ("64 x 1k", "1 x 768") and not tune else (64,)):
                case = Decode(model, lengths, block_size)
                floor = ceilings.floor(case.bytes)
                took = attempt(lambda case=case: case.time(decode_config(128, 2, case.model.heads)))
                library = attempt(case.library) if len(set(lengths)) == 1 and block_size == 64 else math.nan
                table.add(f"  {model.name} {name} block {block_size}: {floor:.2f} {took:.2f} ({floor / took:.0%}) "
                          f"{library:.2f}")
                if tune:
                    best = sorted((attempt(lambda c=c, case=case: case.time(c)), str(c)) for c in decode_configs())
                    for time_, config in best:
                        print(f"    {time_:.2f} ({floor / time_:.0%}) {config}")
                    table.add("    best: " + "; ".join(f"{t:.2f} {c[12:]}" for t, c in best[:4]))
                del case


def prefill_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Causal attention of prompts."""
    table.add("prefill attention: TFLOP/s of the kernel and of torch")
    for model in MODELS:
        for name, lengths in {"1 x 8k": [8192], "16 x 512": [512] * 16}.items():
            for block_size in ((64,) if tune else (16, 32, 64, 128)):
                case = Prefill(model, lengths, block_size)
                took = attempt(lambda case=case: case.time(prefill_config(128, 2)))
                library = attempt(case.library)
                table.add(f"  {model.name} {name} block {block_size}: {case.operations / took / 1e6:.0f} "
                          f"{case.operations / library / 1e6:.0f}")
                if tune:
                    best = sorted((attempt(lambda c=c, case=case: case.time(c)), str(c)) for c in prefill_configs()
                                  if block_size == max(64, c.keys))
                    rates = [f"{case.operations / took / 1e6:.0f} {config[13:]}" for took, config in best]
                    print("    " + "\n    ".join(rates))
                    table.add("    best: " + "; ".join(rates[:4]))
                del case


def linear_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """Each matrix alone, launched back to back over distinct copies."""
    table.add("linear, us: floor; then kernel / library at 1, 2, 4, 8, 16 rows")
    for model in MODELS:
        for name, (n, k, gated) in {**model.linears(), "lm_head": (model.vocab, model.hidden, False)}.items():
            if tune and name != "lm_head":
                continue
            figures, floor = [], 0.0
            for rows in (1, 8, 16) if tune else (1, 2, 4, 8, 16):
                case = Linear(n, k, gated, rows)
                floor = ceilings.floor(case.bytes)
                figures.append(f"{attempt(case.time):.2f} / {attempt(case.library):.2f}")
                if tune:
                    tried = product_configs(k, rows)
                    best = sorted((attempt(lambda c=c, case=case: case.time(c)), str(c)[13:]) for c in tried)
                    table.add(f"    rows {rows} best: " + "; ".join(f"{t:.2f} {c}" for t, c in best[:4]))
                del case
            table.add(f"  {model.name} {name} {n} x {k}{' gated' if gated else ''}: {floor:.2f}; {', '.join(figures)}")


def gated_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """The gated product of more rows than the small products take."""
    table.add("gated product with its activation, us: floor, kernel, library")
    for model in MODELS:
        entries = []
        for rows in GATED_ROWS:
            case = Gated(model, rows)
            took, library = attempt(lambda case=case: case.took(case.chosen)), case.library()
            table.add(f"  {model.name} rows {rows}: {ceilings.floor(case.bytes, case.operations):.2f} {took:.2f} "
                      f"{library:.2f}")
            if tune:
                tried = gated_configs(rows)
                best = sorted((attempt(lambda c=c, case=case: case.took(c)), dataclasses.astuple(c)) for c in tried)
                print("    " + "\n    ".join(f"{t:.2f} {c}" for t, c in best))
                table.add("    best: " + "; ".join(f"{t:.2f} {c}" for t, c in best[:4]))
                entries.append((rows, best[0][1] if best[0][0] < 0.98 * library else None))
            del case
        if tune:
            table.add(f"    for kernels/tuned_gated.py: {(model.inner, model.hidden)}: {tuple(entries)},")


def layers_section(table: Table, ceilings: Ceilings, tune: bool) -> dict[tuple[str, int], Configs]:
    """A whole layer: what a decode step spends, and the configurations of its matrices within it, by model and rows."""
    tuned: dict[tuple[str, int], Configs] = {}
    table.add("a decode step's layer, us: floor, ours, with the library's products; all layers ms; what each kernel "
              "adds (its floor), and the rest")
    for model, rows in itertools.product(MODELS, TUNED_ROWS if tune else (1, 2, 4, 8, 16)):
        case = Layers(model, rows, 768)
        ours, library = case.time({}), case.time(dict.fromkeys(model.linears()))
        floors = {name: ceilings.floor(size) for name, size in case.bytes().items()}
        adds = {name: ours - case.time({}, name) for name in floors}
        parts = ", ".join(f"{name} {took:.1f} ({floors[name]:.1f})" for name, took in adds.items())
        table.add(f"  {model.name} rows {rows}: {sum(floors.values()):.2f} {ours:.2f} {library:.2f}; "
                  f"{ours * model.layers / 1e3:.3f}; {parts}, rest {ours - sum(adds.values()):.1f}; "
                  f"same with and without overlap: {case.agrees({})}")
        if tune:
            tuned[model.name, rows] = tune_layer(table, case)
        del case
    return tuned


def tune_layer(table: Table, case: Layers) -> Configs:
    """One matrix after the other, each with the best found before it; then what another decode attention would give."""
    model, rows = case.model, case.rows

    def best(name: str, tried: Iterable[T], measure: Callable[[T], float]) -> tuple[float, T]:
        found = sorted(((attempt(lambda c=c: measure(c)), c) for c in tried), key=lambda entry: entry[0])
        texts = [f"{took:.2f} {str(config).split('(')[-1]}" for took, config in found]
        print(f"    {name}:\n      " + "\n      ".join(texts))
        table.add(f"    {name}: " + "; ".join(texts[:4]))
        return found[0]

    chosen: Configs = {}
    _, decode = best("decode", decode_configs(), lambda c: (case.set_decode(c), case.time(chosen))[1])
    case.set_decode(decode)
    for name, (_, k, _) in model.linears().items():
        tried = [None, *product_configs(k, rows)]
        _, chosen[name] = best(name, tried, lambda c, name=name: case.time({**chosen, name: c}))
    error = relative_error(case.run(chosen), case.run(dict.fromkeys(model.linears())))
    best("decode", decode_configs(), lambda c: (case.set_decode(c), case.time(chosen))[1])
    case.set_decode(decode)
    chosen["lm_head"] = tune_head(table, model, rows)
    table.add(f"    all best together: {case.time(chosen):.2f}, agrees {case.agrees(chosen)}, from the library "
              f"{error:.1%} apart")
    return chosen


def tune_head(table: Table, model: Model, rows: int) -> SkinnyConfig | None:
    """The last product, alone."""
    case = Linear(model.vocab, model.hidden, False, rows)
    found: list[tuple[float, SkinnyConfig | None]] = [(case.library(), None)]
    found += [(attempt(lambda c=c: case.time(c)), c) for c in product_configs(model.hidden, rows)]
    found.sort(key=lambda entry: entry[0])
    table.add("    lm_head: " + "; ".join(f"{took:.2f} {str(config).split('(')[-1]}" for took, config in found[:4]))
    return found[0][1]


TUNED_HEADER = '''"""Generated by benchmarks/gpu_kernels.py --only layers --tune --write FILE; do not edit.

(outputs, inputs, gated) of a matrix: for 1 row, for 2 to 8, and for 9 to 16, the fields of a SkinnyConfig; None where
the library's product is faster.
"""

from __future__ import annotations

Fields = tuple[int, int, int, bool]

PRODUCTS: dict[tuple[int, int, bool], tuple[Fields | None, Fields | None, Fields | None]] = {
'''


def write_products(path: str, tuned: dict[tuple[str, int], Configs]) -> None:
    """kernels/tuned_products.py, from what each model's layers chose for each class of rows."""
    with open(path, "w") as file:
        file.write(TUNED_HEADER)
        for model in MODELS:
            shapes = {**model.linears(), "lm_head": (model.vocab, model.hidden, False)}
            for name, shape in shapes.items():
                configs = [tuned[model.name, rows][name] for rows in TUNED_ROWS]
                fields = ",\n        ".join(str(None if c is None else dataclasses.astuple(c)) for c in configs)
                file.write(f"    {shape}: (  # {model.name}, {name}\n        {fields}),\n")
        file.write("}\n")


def small_kernels(model: Model, rows: int) -> dict[str, tuple[int, float]]:
    """Bytes and microseconds of each kernel between the products."""
    copies = max(2, min(40, math.ceil(L2_BYTES / (rows * model.hidden * 2))))
    xs = [torch.randn(rows, model.hidden, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
    weight = torch.ones(model.hidden, dtype=DTYPE, device=DEVICE)
    gates = [torch.randn(rows, 2 * model.inner, dtype=DTYPE, device=DEVICE) for _ in range(min(copies, 8))]
    heads, size = model.heads + 2 * model.kv_heads, rows * model.hidden * 2
    cache = Paged(model, [rows], [1], 64, 1).caches[0]
    qkvs = [torch.randn(rows, heads * model.head_dim, dtype=DTYPE, device=DEVICE) for _ in range(min(copies, 8))]
    places = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    cos, sin = torch.randn(2, rows, model.head_dim // 2, device=DEVICE)
    norms = (torch.ones(model.head_dim, dtype=DTYPE, device=DEVICE),) * 2
    return {
        "rms_norm": (2 * size, microseconds([lambda x=x: rms_norm(x, weight, 1e-6) for x in xs])),
        "silu_mul": (6 * rows * model.inner, microseconds([lambda g=g: silu_mul(g) for g in gates])),
        "qkv_rope": (4 * qkvs[0].numel(), microseconds([
            lambda q=q: qkv_rope(q, places, places, cos, sin, norms, 1e-6, cache, model.heads) for q in qkvs]))}


def small_section(table: Table, ceilings: Ceilings, tune: bool) -> None:
    """The kernels between the products."""
    table.add("small kernels, us: floor, kernel")
    for model, rows in itertools.product(MODELS, (1, 64, 256, 8192)):
        table.add(f"  {model.name} rows {rows}: " + ", ".join(
            f"{name} {ceilings.floor(n):.2f} {took:.2f}" for name, (n, took) in small_kernels(model, rows).items()))


SECTIONS = {"decode": decode_section, "gated": gated_section, "layers": layers_section, "linear": linear_section,
            "prefill": prefill_section, "small": small_section}


@torch.inference_mode()
def main() -> None:
    """Runs the sections and prints their lines once more, together, last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--write", help="with --tune: kernels/tuned_products.py")
    options = parser.parse_args()
    sections = options.only.split(",")
    torch.manual_seed(0)
    if options.tune:
        compile_all(set(sections))
    ceilings, table = Ceilings(), Table()
    table.add(f"copy {ceilings.copy:.2f} TB/s, read {ceilings.read:.2f} TB/s, product {ceilings.product:.0f} TFLOP/s")
    for name in sections:
        begin = time.perf_counter()
        result = SECTIONS[name](table, ceilings, options.tune)
        if name == "layers" and options.write:
            write_products(options.write, result)
        print(f"{name}: {time.perf_counter() - begin:.0f} s")
        torch.cuda.empty_cache()
    print("\n" + "\n".join(table.lines))


if __name__ == "__main__":
    main()
