"""The router: which experts each token goes to, and with which weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native.rows import widened
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream, add, scale
from sidestep.kernels.ops.routing import Choice, Joined, Routed, Undecided, choose_experts


class Router:
    """Chooses the experts of each token, in float32."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        own: range,
        *,
        eps: float,
    ) -> None:
        """Load the weights. name: the layer's. own: this rank's experts. eps: of the norm."""
        self._own = own if spec.whole else None
        own_name, routing = f"{name}.{spec.names.router}", spec.routing
        weight = weights.get(f"{own_name}.weight", (spec.num_experts, hidden_size))
        self._bias = (
            weights.exact(f"{own_name}.e_score_correction_bias", (spec.num_experts,))
            if routing.bias
            else None
        )
        self._product_bias = (
            weights.exact(f"{own_name}.bias", (spec.num_experts,)) if routing.product_bias else None
        )
        self._choice = Choice(
            spec.num_chosen,
            routing.scores == "sigmoid",
            routing.normalised,
            routing.scale,
            routing.groups,
            routing.chosen_groups,
        )
        self._norm = (
            RmsNorm(weights.get(f"{name}.{spec.names.router_norm}", (hidden_size,)), eps)
            if routing.norm
            else None
        )
        self._root = hidden_size**-0.5
        self._expert_scales = (
            weights.exact(f"{name}.{spec.names.expert_scales}", (spec.num_experts,))[
                own.start : own.stop
            ]
            if routing.expert_scales
            else None
        )
        self._weight = weight if on_gpu(weight) else None
        self._product = None if on_gpu(weight) else CpuProduct(weight.float())
        self._factor = torch.full((1,), self._root) if self._norm and not self.on_gpu else None
        """The same, where kernels in C find it."""
        self._joined: Joined | None = None
        self.read_first: Callable[[Tensor, int], Tensor | None] | None = None
        """Returns what experts read first, for rows [T, D] and the number of experts of each."""

    def join(self, gate: Tensor | None) -> None:
        """Let each row have the shared expert too, as the one behind all others; on a GPU only.

        gate: the row [1, D] of the shared expert's own gate, if there is one.
        """
        assert self._weight is not None
        if gate is not None:
            self._weight = torch.cat([self._weight, gate])
        self._joined = Joined(gated=gate is not None)

    @property
    def on_gpu(self) -> bool:
        """Whether the layer's weights are on a GPU."""
        return self._weight is not None

    def of_stream(self, stream: Stream) -> tuple[Tensor, Routed | Undecided]:
        """Return a stream's norm, and the experts of its rows. The router has no norm of its own.

        On a GPU, the router's product computes the norm where it is begun, and the experts' kernels
        choose.
        """
        if self._weight is None or self._expert_scales is not None:
            x = stream.normed()
            return x, self(x)
        from sidestep.kernels.experts.routing_triton import route_stream

        chosen = self._choice.num_chosen + (self._joined is not None)
        then = self.read_first and self.read_first(stream.hidden, chosen)
        return route_stream(stream, *self._how(self._weight), joined=self._joined, then=then)

    def __call__(self, x: Tensor) -> Routed:
        """Return the experts of each row of x [T, D], by their numbers on this rank."""
        if self._norm is not None:
            x = self._norm(x)
            x = x.mul_(self._root) if self._factor is None else scale(x, self._factor)
        if self._weight is None:
            return self._chosen_on_cpu(x)
        return self._chosen_on_gpu(x, self._weight)

    def _how(
        self, weight: Tensor
    ) -> tuple[Tensor, Tensor | None, Choice, range | None, Tensor | None]:
        return weight, self._bias, self._choice, self._own, self._product_bias

    def _chosen_on_gpu(self, x: Tensor, weight: Tensor) -> Routed:
        from sidestep.kernels.experts.choices_triton import decided
        from sidestep.kernels.experts.routing_triton import route

        routed = decided(route(x, *self._how(weight), joined=self._joined))
        return routed if self._expert_scales is None else routed.scaled(self._expert_scales)

    def _chosen_on_cpu(self, x: Tensor) -> Routed:
        assert self._product is not None
        wide = widened(x)
        logits = self._product(x.float() if wide is None else wide)
        if self._product_bias is not None:
            add(logits, self._product_bias)
        return choose_experts(logits, self._bias, self._choice, self._own, self._expert_scales)
