"""A mixture of experts: the router, the experts that it chooses for each token, a shared one.

Tensor-parallel ranks have a part of each expert's intermediate size, and the whole router.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.layers.linear import Linear, SumOverRanks, column_parallel
from sidestep.executor.layers.weight_loader import Weights
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.routing import Choice, Routed, choose_experts, row_sigmoid


class Router:
    """Chooses the experts of each token, in float32."""

    def __init__(self, spec: ExpertsSpec, hidden_size: int, weights: Weights, name: str) -> None:
        """Load the weights. name: the layer's."""
        weight = weights.get(f"{name}.gate.weight", (spec.num_experts, hidden_size))
        routing = spec.routing
        self._bias = (
            weights.exact(f"{name}.gate.e_score_correction_bias", (spec.num_experts,))
            if routing.bias
            else None
        )
        self._choice = Choice(
            spec.num_chosen,
            routing.scores == "sigmoid",
            routing.normalised,
            routing.scale,
            routing.groups,
            routing.chosen_groups,
        )
        self._weight = weight if on_gpu(weight) else None
        self._product = None if on_gpu(weight) else CpuProduct(weight.float())

    @property
    def on_gpu(self) -> bool:
        """Whether the layer's weights are on a GPU."""
        return self._weight is not None

    def __call__(self, x: Tensor) -> Routed:
        """Return the experts of each row of x [T, D]."""
        if self._weight is not None:
            from sidestep.kernels.products.routing_triton import route

            return route(x, self._weight, self._bias, self._choice)
        assert self._product is not None
        return choose_experts(self._product(x.float()), self._bias, self._choice)


class ExpertProducts(Protocol):
    """The chosen experts' products."""

    def __call__(self, x: Tensor, routed: Routed, out: Tensor, *, add: bool) -> None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it."""


class ExpertWeights:
    """Loads a rank's part of each expert's matrices."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        parallel: Parallel,
    ) -> None:
        self.spec = spec
        self._hidden_size = hidden_size
        self._weights = weights
        self._name = f"{name}.experts"
        self._part = parallel.share(spec.width)

    def gate_up(self, expert: int) -> Tensor:
        """Return the gate's matrix over the other's, [2 F, D]."""
        names, shape = self.spec.names, (self.spec.width, self._hidden_size)
        return torch.cat(
            [
                self._weights.get(f"{self._name}.{expert}.{one}.weight", shape, rows=self._part)
                for one in (names.gate, names.up)
            ]
        )

    def down(self, expert: int) -> Tensor:
        """Return the matrix [D, F]."""
        name = f"{self._name}.{expert}.{self.spec.names.down}.weight"
        return self._weights.get(name, (self._hidden_size, self.spec.width), columns=self._part)


class CpuExperts:
    """Experts on a CPU: each multiplies all its tokens at once.

    A row of a product does not depend on the rows beside it (see CpuProduct), and a token's results
    are added in the order of its choice. So the bits of a token depend on that token alone.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        """Load the experts one by one."""
        experts = range(weights.spec.num_experts)
        self._activation = weights.spec.activation
        self._gate_up = [Linear(weights.gate_up(expert)) for expert in experts]
        self._down = [Linear(weights.down(expert)) for expert in experts]

    def __call__(self, x: Tensor, routed: Routed, out: Tensor, *, add: bool) -> None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it."""
        chosen = routed.ids.shape[1]
        # The pairs of a token and a choice, in the order of their experts.
        pairs = routed.ids.flatten().argsort(stable=True)
        counts = torch.bincount(routed.ids.flatten(), minlength=len(self._down)).tolist()
        results = x.new_empty(routed.ids.numel(), x.shape[1])
        for gate_up, down, own in zip(self._gate_up, self._down, pairs.split(counts), strict=True):
            if len(own):
                gated = gate_up.gated(x.index_select(0, own // chosen), self._activation)
                results[own] = down(gated)
        weighted = results.unflatten(0, routed.ids.shape).float() * routed.weights[..., None]
        total = weighted[:, 0]
        for rank in range(1, chosen):
            total += weighted[:, rank]
        if add:
            out += total
        else:
            out.copy_(total)


class GpuExperts:
    """Experts on a GPU, whose matrices are stacked."""

    def __init__(self, weights: ExpertWeights) -> None:
        """Load the experts one by one into the stacks."""
        num_experts, one = weights.spec.num_experts, (weights.gate_up(0), weights.down(0))
        self._gelu = weights.spec.activation == "gelu_tanh"
        self._gate_up, self._down = (part.new_empty(num_experts, *part.shape) for part in one)
        for expert in range(num_experts):
            self._gate_up[expert] = weights.gate_up(expert)
            self._down[expert] = weights.down(expert)

    def __call__(self, x: Tensor, routed: Routed, out: Tensor, *, add: bool) -> None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it."""
        from sidestep.kernels.products.experts_triton import multiply_experts

        multiply_experts(x, routed, self._gate_up, self._down, out, add=add, gelu=self._gelu)


class SharedExpert:
    """The expert that takes every token."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        parallel: Parallel,
    ) -> None:
        width, part, own = (
            spec.shared_width,
            parallel.share(spec.shared_width),
            f"{name}.{spec.names.shared}",
        )
        self._activation = spec.activation
        self._gate_up = column_parallel(
            weights,
            [(f"{own}.gate_proj", width, part), (f"{own}.up_proj", width, part)],
            hidden_size,
        )
        self.down = Linear(
            weights.get(f"{own}.down_proj.weight", (hidden_size, width), columns=part)
        )
        self._own_gate = (
            Linear(weights.get(f"{own}_gate.weight", (1, hidden_size)))
            if spec.shared_gate
            else None
        )

    def inner(self, x: Tensor) -> Tensor:
        """Return what `down` multiplies, [T, F], for x [T, D]."""
        gated = self._gate_up.gated(x, self._activation)
        if self._own_gate is None:
            return gated
        factor = self._own_gate(x)
        # The factor is common to a row, so that it may come before the product.
        return gated.mul_(torch.sigmoid(factor) if on_gpu(x) else row_sigmoid(factor))


class ExpertsPart(NamedTuple):
    """The part of one rank's experts in what is added to the residual stream."""

    shared: SharedExpert | None
    products: ExpertProducts
    x: Tensor
    routed: Routed

    def value(self, out: Tensor | None = None) -> Tensor:
        """Return the part [T, D]. out: memory for it, on a GPU only."""
        if self.shared is not None:
            out = self.shared.down(self.shared.inner(self.x), out)
        elif out is None:
            out = torch.empty_like(self.x)
        self.products(self.x, self.routed, out, add=self.shared is not None)
        return out

    def add_to(self, residual: Tensor, norm: RmsNorm | None = None) -> BegunNorm | None:
        """Add the part to residual, in place. No norm is begun."""
        if self.shared is not None:
            self.shared.down.add_to(residual, self.shared.inner(self.x))
        self.products(self.x, self.routed, residual, add=True)
        return None


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
    ) -> None:
        self._following = following
        own = f"{name}.{spec.names.layer}"
        self._router = Router(spec, hidden_size, weights, own)
        loaded = ExpertWeights(spec, hidden_size, weights, own, parallel)
        self._products: ExpertProducts = (
            GpuExperts(loaded) if self._router.on_gpu else CpuExperts(loaded)
        )
        self._shared = (
            SharedExpert(spec, hidden_size, weights, own, parallel) if spec.shared_width else None
        )
        self._sum = SumOverRanks(parallel, SumBuffer.MLP, after)

    def __call__(self, stream: Stream) -> Stream:
        """Return the stream with the experts added."""
        x = stream.normed()
        part = ExpertsPart(self._shared, self._products, x, self._router(x))
        return self._sum.add(stream.hidden, part, self._following)
