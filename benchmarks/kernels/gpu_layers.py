"""Layers of a model as a decode step runs them, one kernel after the other.

gpu_kernels.py times them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.gpu_attention import Paged
from benchmarks.kernels.gpu_models import Model
from benchmarks.kernels.gpu_timing import DEVICE, DTYPE, microseconds
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.decode_attention_triton import decode_attention
from sidestep.kernels.attention.decode_config import DecodeConfig, config_of
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.products.linear import add_linear, gated_linear, linear
from sidestep.kernels.products.own_linear import Config, add_own_linear, own_linear
from sidestep.kernels.triton.silu_mul_triton import silu_mul

Configs = dict[str, Config | None]
T = TypeVar("T")


class Layers:
    """Decode step of a model's layers, without its embedding and its head."""

    def __init__(
        self, model: Model, rows: int, context: int, decode: DecodeConfig | None = None
    ) -> None:
        self.model, self.rows = model, rows
        self.paged = Paged(model, [context] * rows, [1] * rows, 64, model.kept)
        self.weights = [
            {
                name: torch.randn(n * (1 + gated), k, dtype=DTYPE, device=DEVICE) * k**-0.5
                for name, (n, k, gated) in model.linears().items()
            }
            for _ in range(model.kept)
        ]
        self.norm = RmsNorm(torch.ones(model.hidden, dtype=DTYPE, device=DEVICE), 1e-6)
        head_norm = torch.ones(model.head_dim, dtype=DTYPE, device=DEVICE)
        cos, sin = torch.randn(2, max(context, rows), model.head_dim // 2, device=DEVICE).sign()
        self.rope = Rope(cos, sin, (head_norm, head_norm) if model.head_norms else None, 1e-6)
        self.positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.x = torch.randn(rows, model.hidden, dtype=DTYPE, device=DEVICE)
        self._before: dict[str, Any] = {}
        self.set_decode(decode or config_of(model.head_dim, 2, model.heads, model.kv_heads, 1))

    def set_decode(self, config: DecodeConfig) -> None:
        """Set another configuration of decode attention."""
        m = self.model
        self.scratch = DecodeScratch(m.heads, m.kv_heads, m.head_dim, self.rows, DEVICE, config)
        self.paged.plan(config.tile, 16)
        few = self.scratch.few
        taken = few is not None and self.rows <= few.most_rows
        self.work = self.paged.plan_few(self.scratch) if taken else None

    def bytes(self) -> dict[str, int]:
        """Return the bytes that each kernel of a layer reads: weights, or keys and values."""
        m = self.model
        weights = {name: n * (1 + gated) * k * 2 for name, (n, k, gated) in m.linears().items()}
        return {**weights, "attention": sum(self.paged.lengths) * 2 * m.kv_heads * m.head_dim * 2}

    def run(self, configs: Configs, skip: str = "") -> Tensor:
        """Run all layers and return the stream.

        configs: configurations by matrix; None stands for the library's product, and a matrix
        without an entry is computed as the engine does. skip: name of the part that is left out.
        """
        stream = Stream(self.x.clone(), self.norm)
        for weights, cache in zip(self.weights, self.paged.caches, strict=True):
            qkv = self._made(
                "qkv", skip, lambda s=stream, w=weights: self._project(s, w, "qkv", configs)
            )
            out = self._made("attention", skip, lambda q=qkv, c=cache: self._attend(q, c))
            stream = self._made(
                "o", skip, lambda s=stream, o=out, w=weights: self._add(s, o, w, "o", configs)
            )
            act = self._made(
                "gate_up", skip, lambda s=stream, w=weights: self._project(s, w, "gate_up", configs)
            )
            stream = self._made(
                "down", skip, lambda s=stream, a=act, w=weights: self._add(s, a, w, "down", configs)
            )
        return stream.hidden

    def _made(self, name: str, skip: str, make: Callable[[], T]) -> T:
        """Return the result of a part, or its result of the last run if the part is left out."""
        if name != skip:
            self._before[name] = make()
        return self._before[name]

    def _attend(self, qkv: Tensor, cache: Tensor) -> Tensor:
        m, b = self.model, self.paged
        out = qkv.new_empty(self.rows, m.heads * m.head_dim)
        rope: Rope | None = self.rope
        if self.rows > 16:  # as executor/attention/triton_backend.py does
            qkv_rope(qkv, self.positions, self.positions, self.rope, cache, m.heads)
            rope = None
        decode_attention(
            qkv,
            cache,
            b.tables,
            b.slots,
            b.seq_lens,
            b.decode_ends,
            out,
            self.scratch,
            num_heads=m.heads,
            window=0,
            scale=m.head_dim**-0.5,
            rope=rope,
            few_work=self.work,
        )
        return out

    def _project(
        self, stream: Stream, weights: dict[str, Tensor], name: str, configs: Configs
    ) -> Tensor:
        """Return a product of the normed stream."""
        weight, gated = weights[name], name == "gate_up"
        if name not in configs:
            return (gated_linear if gated else linear)(stream, weight, None)
        if (config := configs[name]) is not None:
            return own_linear(stream, weight, gated=gated, config=config)
        y = F.linear(stream.normed(), weight)
        return silu_mul(y) if gated else y

    def _add(
        self, stream: Stream, x: Tensor, weights: dict[str, Tensor], name: str, configs: Configs
    ) -> Stream:
        """Return the stream after a product was added to it."""
        hidden, weight = stream.hidden, weights[name]
        if name not in configs:
            begun = add_linear(hidden, x, weight, None, self.norm)
        elif (config := configs[name]) is not None:
            begun = add_own_linear(hidden, x, weight, norm=self.norm, config=config)
        else:
            hidden.addmm_(x, weight.t())
            begun = None
        return Stream(hidden, self.norm, begun)

    def time(self, configs: Configs, skip: str = "") -> float:
        """Return the microseconds of one layer."""
        return microseconds([lambda: self.run(configs, skip)] * 2) / self.model.kept

    def agrees(self, configs: Configs) -> bool:
        """Return whether a captured run equals one without overlapping kernels.

        In the captured run kernels may overlap; in the other one each ends before the next begins.
        """
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
        """Return the result of `run` when each kernel ends before the next begins.

        Only names that this module itself looks up can be replaced from here, so `run` must call
        the functions that launch kernels by such names.
        """
        names = (
            "linear",
            "gated_linear",
            "add_linear",
            "own_linear",
            "add_own_linear",
            "qkv_rope",
            "decode_attention",
        )
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
