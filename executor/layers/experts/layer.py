"""A mixture of experts: the router, the experts that it chooses for each token, a shared one.

Tensor-parallel ranks have the whole router, and a part of each expert's intermediate size or, with
expert parallelism, some whole experts. The sum over ranks is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.executor.layers.experts.cpu_experts import CpuExperts
from sidestep.executor.layers.experts.fused_experts import FusedExperts, Mxfp4Experts
from sidestep.executor.layers.experts.gpu_experts import GpuExperts
from sidestep.executor.layers.experts.native_experts import NativeExperts
from sidestep.executor.layers.experts.products import ExpertProducts
from sidestep.executor.layers.experts.router import Router
from sidestep.executor.layers.experts.separate_experts import SeparateExperts
from sidestep.executor.layers.experts.shared_expert import (
    ExpertWeights,
    JoinedExperts,
    SharedExpert,
    SharedMatrices,
    gate_row,
    may_join,
)
from sidestep.executor.layers.linear import SumOverRanks
from sidestep.executor.layers.norms import load_norm
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import ExpertNorms, ExpertsSpec, ExpertStorage, NormSpec
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native.tape import empty
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm, Stream, add
from sidestep.kernels.ops.routing import Routed, Undecided

_STORED: dict[ExpertStorage, type[SeparateExperts | FusedExperts]] = {
    "apart": SeparateExperts,
    "interleaved": FusedExperts,
    "mxfp4": Mxfp4Experts,
}
"""Way in which a checkpoint stores experts -> what loads them."""


class ExpertsPart(NamedTuple):
    """The part of one rank's experts in what is added to the residual stream."""

    shared: SharedExpert | None
    products: ExpertProducts
    x: Tensor
    routed: Routed | Undecided

    def value(self, out: Tensor | None = None) -> Tensor:
        """Return the part [T, D]. out: memory for it, on a GPU only."""
        if self.shared is not None:
            out = self.shared.down(self.shared.inner(self.x), out)
        elif out is None:
            out = torch.empty_like(self.x)
        self.products(self.x, self.routed, out, add=self.shared is not None)
        return out

    def add_to(self, residual: Tensor, norm: RmsNorm | None = None) -> Begun | None:
        """Add the part to residual, in place. Return the part of the norm that is computed."""
        if self.shared is not None:
            self.shared.down.add_to(residual, self.shared.inner(self.x))
        return self.products(self.x, self.routed, residual, add=True, norm=norm)


class NormedParts:
    """The norms of experts and of a shared expert which are normed apart."""

    def __init__(self, names: ExpertNorms, load: Callable[[str], RmsNorm]) -> None:
        """Load the weights. load: returns the norm of the stream that has this name."""
        self.before, self._after, self._after_shared = (
            load(name) for name in (names.before, names.after, names.after_shared)
        )

    def sum(self, experts: Tensor, shared: Tensor, parallel: Parallel) -> Tensor:
        """Return the sum of the norms of both parts [T, D], each of which is a rank's."""
        if parallel.size > 1:
            experts, shared = parallel.all_reduce(torch.cat([experts, shared])).chunk(2)
        return add(self._after(experts), self._after_shared(shared))


class Experts:
    """The experts of one layer, in the place of an MLP.

    name: the layer's. after: the norm of the result, if there is one. following: the norm of the
    stream behind it.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        following: RmsNorm,
        parallel: Parallel,
        after: RmsNorm | None = None,
        *,
        norm_spec: NormSpec,
    ) -> None:
        self._following, self._after, self._parallel = following, after, parallel
        own = spec.names.place(name)
        loaded = _STORED[spec.stored](spec, hidden_size, weights, own, parallel)
        self._router = Router(spec, hidden_size, weights, own, loaded.experts, eps=norm_spec.eps)
        shared = (
            SharedMatrices(spec, hidden_size, weights, own, parallel) if spec.shared_width else None
        )
        found: ExpertWeights = loaded
        if shared is not None and self._router.on_gpu and may_join(loaded, shared):
            found, row = JoinedExperts(loaded, shared), None
            if spec.shared_gate:
                row = gate_row(shared.gate(), weights.dtype)
            self._router.join(row)
            shared = None
        self._products: ExpertProducts
        if self._router.on_gpu:
            self._products = GpuExperts(found)
            self._router.read_first = self._products.read_first
        else:
            native = NativeExperts.of(loaded, weights.dtype)
            self._products = CpuExperts(loaded, weights.dtype) if native is None else native
        self._shared = None if shared is None else SharedExpert(spec, shared)
        self._norms = (
            None
            if spec.norms is None
            else NormedParts(
                spec.norms,
                lambda norm: load_norm(norm_spec, weights, f"{name}.{norm}.weight", hidden_size),
            )
        )
        self._sum = SumOverRanks(parallel, SumBuffer.MLP, after)

    def precede(self, behind: ProductBehind) -> None:
        """Take the product of the next norm, which these experts may compute."""
        if isinstance(self._products, GpuExperts):
            self._products.behind = behind

    def __call__(self, stream: Stream) -> Stream:
        """Return the stream with the experts added."""
        if self._norms is not None:
            return self._add_normed(stream, self._norms)
        x, routed = self._router.of_stream(stream)
        part = ExpertsPart(self._shared, self._products, x, routed)
        return self._sum.add(stream.hidden, part, self._following)

    def _add_normed(self, stream: Stream, norms: NormedParts) -> Stream:
        """Return the stream with experts and the shared one added, which are normed apart."""
        assert self._shared is not None, "there is nothing to be normed apart from"
        shared = self._shared.down(self._shared.inner(stream.normed()))
        experts = torch.empty_like(shared) if on_gpu(shared) else empty(shared.shape, shared.dtype)
        x, routed = norms.before(stream.hidden), self._router(stream.hidden)
        self._products(x, routed, experts, add=False)
        whole = norms.sum(experts, shared, self._parallel)
        if self._after is not None:
            whole = self._after(whole)
        return Stream(add(stream.hidden, whole), self._following)
