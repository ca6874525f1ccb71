"""A mixture of experts: the router, the experts that it chooses for each token, a shared one.

Tensor-parallel ranks have the whole router, and a part of each expert's intermediate size or, with
expert parallelism, some whole experts. The sum over ranks is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.layers.fused_experts import FusedExperts, Mxfp4Experts, experts_of_rank
from sidestep.executor.layers.linear import Linear, SumOverRanks
from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.layers.norms import load_norm
from sidestep.executor.layers.shared_expert import (
    ExpertWeights,
    JoinedExperts,
    SharedExpert,
    SharedMatrices,
    expert_matrix,
    gate_row,
    may_join,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.layer_spec import (
    ClampedSwiglu,
    ExpertNorms,
    ExpertsSpec,
    ExpertStorage,
    NormSpec,
)
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.expert_matrix import ExpertMatrix
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.routing import Choice, Joined, Routed, Undecided, choose_experts
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

T = TypeVar("T")


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
        self._factor = hidden_size**-0.5
        self._expert_scales = (
            weights.exact(f"{name}.{spec.names.expert_scales}", (spec.num_experts,))[
                own.start : own.stop
            ]
            if routing.expert_scales
            else None
        )
        self._weight = weight if on_gpu(weight) else None
        self._product = None if on_gpu(weight) else CpuProduct(weight.float())
        self._joined: Joined | None = None

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

        return route_stream(stream, *self._how(self._weight), joined=self._joined)

    def __call__(self, x: Tensor) -> Routed:
        """Return the experts of each row of x [T, D], by their numbers on this rank."""
        if self._norm is not None:
            x = self._norm(x).mul_(self._factor)
        routed = self._chosen(x)
        if self._expert_scales is None:
            return routed
        # Weights of other ranks' experts are not used, so that any factor will do.
        known = routed.ids.clamp(0, len(self._expert_scales) - 1)
        factors = self._expert_scales.index_select(0, known.flatten())
        return Routed(routed.ids, routed.weights * factors.view_as(routed.weights))

    def _how(
        self, weight: Tensor
    ) -> tuple[Tensor, Tensor | None, Choice, range | None, Tensor | None]:
        return weight, self._bias, self._choice, self._own, self._product_bias

    def _chosen(self, x: Tensor) -> Routed:
        if self._weight is not None:
            from sidestep.kernels.experts.routing_triton import decided, route

            return decided(route(x, *self._how(self._weight), joined=self._joined))
        assert self._product is not None
        logits = self._product(x.float())
        if self._product_bias is not None:
            logits += self._product_bias
        routed = choose_experts(logits, self._bias, self._choice)
        return routed if self._own is None else routed.on_rank(self._own)


class ExpertProducts(Protocol):
    """The chosen experts' products."""

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> BegunNorm | None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. Return the part of it that is computed, or
        None.
        """


def matrix_names(spec: ExpertsSpec, name: str, expert: int) -> tuple[str, str, str]:
    """Return the names of an expert's matrices: gate, up and down. name: the layer's."""
    gate, up, down = (
        f"{name}.experts.{expert}.{one}"
        for one in (spec.names.gate, spec.names.up, spec.names.down)
    )
    return gate, up, down


def experts_elsewhere(spec: ExpertsSpec, name: str, parallel: Parallel) -> Iterator[str]:
    """Yield how the names of weights begin that only other ranks need. name: the layer's."""
    own = experts_of_rank(spec, parallel)
    for expert in range(spec.num_experts):
        if expert not in own:
            yield f"{name}.experts.{expert}."


class SeparateExperts:
    """Loads a rank's part of matrices that are stored apart."""

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
        self._name = name
        self.experts = experts_of_rank(spec, parallel)
        self._part = range(spec.width) if spec.whole else parallel.share(spec.width)

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        gate, up, _ = matrix_names(self.spec, self._name, expert)
        shape = self.spec.width, self._hidden_size
        parts = {one: self._weights.matrix(one, shape, rows=self._part) for one in (gate, up)}
        return expert_matrix(stacked(parts))

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the matrix [D, F]."""
        _, _, down = matrix_names(self.spec, self._name, expert)
        shape = self._hidden_size, self.spec.width
        return expert_matrix(self._weights.matrix(down, shape, columns=self._part))


def on_device(matrix: ExpertMatrix | CodedMatrix) -> ExpertMatrix | ExpertCodes:
    """Return an expert's matrix as a GPU's kernels take it.

    Raises EngineStartError for groups that no kernel reads.
    """
    if isinstance(matrix, ExpertMatrix):
        return matrix if matrix.scales is None else ExpertCodes.of_mxfp4(matrix)
    return _coded(ExpertCodes.of, matrix)


def _coded(repacked: Callable[[T], ExpertCodes], given: T) -> ExpertCodes:
    """Return repacked codes. Raises EngineStartError where `repacked` raises ValueError."""
    try:
        return repacked(given)
    except ValueError as error:
        raise EngineStartError(f"model: {error}") from None


_TOGETHER = 32 << 20
"""Bytes of matrices in codes that are repacked together."""
_STORED: dict[ExpertStorage, type[SeparateExperts | FusedExperts]] = {
    "apart": SeparateExperts,
    "interleaved": FusedExperts,
    "mxfp4": Mxfp4Experts,
}
"""Way in which a checkpoint stores experts -> what loads them."""


def _linear(matrix: ExpertMatrix | CodedMatrix, dtype: torch.dtype) -> Linear:
    if isinstance(matrix, CodedMatrix):
        return Linear(matrix)
    return Linear(matrix.decoded(dtype).values, matrix.bias)


class CpuExperts:
    """Experts on a CPU: each multiplies all its tokens at once.

    A row of a product does not depend on the rows beside it (see CpuProduct), and a token's results
    are added in the order of its choice. So the bits of a token depend on that token alone.
    """

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype) -> None:
        """Load the experts one by one."""
        self._activation = weights.spec.activation
        self._gate_up = [_linear(weights.gate_up(expert), dtype) for expert in weights.experts]
        self._down = [_linear(weights.down(expert), dtype) for expert in weights.experts]

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. None of it is computed here.
        """
        assert isinstance(routed, Routed)
        chosen = routed.chosen
        ids = routed.ids.flatten()
        # The pairs of a token and a choice, in the order of their experts: other ranks' first.
        pairs = ids.argsort(stable=True)
        counts = torch.bincount(ids + 1, minlength=1 + len(self._down)).tolist()
        others, *parts = pairs.split(counts)
        results = x.new_empty(len(ids), x.shape[1])
        results[others] = 0
        for gate_up, down, own in zip(self._gate_up, self._down, parts, strict=True):
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
        spec, activation = weights.spec, weights.spec.activation
        self._num_experts, self._some = spec.num_experts, spec.whole
        self._gelu = activation == "gelu_tanh"
        self._clamped = (
            (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiglu) else None
        )
        self._gate_up = _stacked(weights.gate_up, weights.experts)
        self._down = _stacked(weights.down, weights.experts)

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> BegunNorm | None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. Return the part of it that is computed, or
        None.
        """
        from sidestep.kernels.experts.experts_triton import few_pairs, multiply_experts

        return multiply_experts(
            x,
            routed,
            self._gate_up,
            self._down,
            out,
            add=add,
            gelu=self._gelu,
            clamped=self._clamped,
            # A rank with whole experts has the same share of the pairs, on average.
            few=few_pairs(len(x), routed.chosen, self._num_experts),
            some=self._some,
            norm=norm,
        )


def _stacked(
    matrix: Callable[[int], ExpertMatrix | CodedMatrix], experts: Sequence[int]
) -> ExpertMatrix | ExpertCodes:
    """Return the matrices of these experts as one. Small ones in codes are repacked together."""
    first = on_device(matrix(experts[0]))
    stack = first.room_for(len(experts))
    if stack.is_meta:
        return stack  # all are alike without memory, and thousands take more than a minute
    stack.put(0, first)
    together = max(1, _TOGETHER // first.nbytes)
    for begin in range(1, len(experts), together):
        end = min(begin + together, len(experts))
        given = [matrix(expert) for expert in experts[begin:end]]
        coded = [one for one in given if isinstance(one, CodedMatrix)]
        if len(coded) == len(given):
            stack.put(slice(begin, end), _coded(ExpertCodes.of_all, coded))
        else:
            for place, one in enumerate(given, begin):
                stack.put(place, on_device(one))
    return stack


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

    def add_to(self, residual: Tensor, norm: RmsNorm | None = None) -> BegunNorm | None:
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
        both = parallel.all_reduce(torch.cat([experts, shared]))
        experts, shared = both.chunk(2)
        return self._after(experts).add_(self._after_shared(shared))


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
        self._products: ExpertProducts = (
            GpuExperts(found) if self._router.on_gpu else CpuExperts(loaded, weights.dtype)
        )
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
        experts = torch.empty_like(shared)
        x, routed = norms.before(stream.hidden), self._router(stream.hidden)
        self._products(x, routed, experts, add=False)
        whole = norms.sum(experts, shared, self._parallel)
        if self._after is not None:
            whole = self._after(whole)
        return Stream(stream.hidden.add_(whole), self._following)
