"""Linear layers of a tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sidestep.executor.layers.matrix_products import product_of, stacked
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.model.layer_spec import Activation, ClampedSwiglu
from sidestep.kernels.ops.clamped_swiglu import clamped_swiglu
from sidestep.kernels.ops.gelu_mul import gelu_mul
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm, Stream, WholeNorm, add
from sidestep.kernels.ops.silu_mul import GateAndUp, computed
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from sidestep.kernels.unfinished_product import Product


class Linear:
    """x W^T + b for x [T, in]; returns [T, out]."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None) -> None:
        self.num_rows, self.num_columns = weight.shape
        self._product = product_of(weight, bias)

    def __repr__(self) -> str:
        return f"Linear({self.num_columns} -> {self.num_rows}, {self._product.kind})"

    @property
    def codes(self) -> DeviceMatrix | None:
        """The matrix, if it is coded and on a GPU, and there is no bias."""
        return self._product.codes

    @property
    def may_share(self) -> bool:
        """Whether its kernels for many rows leave other processors alone."""
        if self.codes is None:
            return False
        from sidestep.kernels.products.coded_linear import by_clusters

        return by_clusters(self.codes)

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Return the product with x, or with the norm of x if that is a stream.

        out: memory for the result, on a GPU only.
        """
        return self._product(x, out)

    def unfinished(self, x: Tensor | Stream) -> Product:
        """Return the product, or what is left of it to the kernel that reads it next."""
        return self._product.unfinished(x)

    def gated(self, x: Tensor | Stream, activation: Activation | ClampedSwiglu = "silu") -> Tensor:
        """Return act(gate) * up of the halves of the product.

        The first half of the matrix's rows belongs to the gate.
        """
        return computed(self.inner(x, activation))

    def inner(
        self, x: Tensor | Stream, activation: Activation | ClampedSwiglu = "silu"
    ) -> Tensor | GateAndUp:
        """Return the result of `gated`, or the halves where the next product computes it."""
        if isinstance(activation, ClampedSwiglu):
            return clamped_swiglu(self(x), activation.alpha, activation.limit)
        if activation == "gelu_tanh":
            return gelu_mul(self(x))
        return self._product.gated(x)

    def add_to(
        self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm | None = None
    ) -> Begun | None:
        """Add x W^T + b to residual, in place.

        norm: the norm that the sum goes through next. Returns the part of it that was computed on
        the way, if any.
        """
        return self._product.add_to(residual, x, norm)


def column_parallel(
    weights: Weights,
    parts: Sequence[tuple[str, int, range]],
    num_inputs: int,
    *,
    bias: bool = False,
) -> Linear:
    """Return one product for several matrices, stacked.

    Each part is (name, rows of the whole matrix, this rank's rows). Raises EngineStartError, which
    names a part, if they are not quantized alike.
    """
    weight = stacked(
        {
            f"{name} {rows}": weights.matrix(name, (total, num_inputs), rows=rows)
            for name, total, rows in parts
        }
    )
    stacked_bias = (
        torch.cat([weights.get(f"{name}.bias", (total,), rows=rows) for name, total, rows in parts])
        if bias
        else None
    )
    return Linear(weight, stacked_bias)


class RankPart(Protocol):
    """A rank's part of a sum over ranks, which is added to the residual stream."""

    def value(self, out: Tensor | None = None) -> Tensor:
        """Return the part [T, out]. out: memory for it, on a GPU only."""

    def add_to(self, residual: Tensor, norm: RmsNorm | None = None) -> Begun | None:
        """Add the part to residual, in place. norm, result: see Linear.add_to."""


class LinearPart(NamedTuple):
    """A product, as a rank's part."""

    linear: Linear
    x: Tensor | GateAndUp

    def value(self, out: Tensor | None = None) -> Tensor:
        """Return the product."""
        return self.linear(computed(self.x), out)

    def add_to(self, residual: Tensor, norm: RmsNorm | None = None) -> Begun | None:
        """Add the product to residual, in place."""
        return self.linear.add_to(residual, self.x, norm)


class SumOverRanks:
    """Adds the parts of all ranks to the residual stream.

    after: a norm of the parts' sum, if the model has one.
    """

    def __init__(self, parallel: Parallel, buffer: SumBuffer, after: RmsNorm | None = None) -> None:
        self._parallel = parallel
        self._buffer = buffer
        self._after = after

    @property
    def is_in_place(self) -> bool:
        """Whether the residual is always written over, by this rank alone."""
        return self._after is None and self._parallel.size == 1

    def add(self, residual: Tensor, part: RankPart, norm: RmsNorm) -> Stream:
        """Return the residual with all parts, on its way through `norm`.

        residual [T, out], the same on all ranks, may be written over.
        """
        if self._after is not None:
            whole = self._parallel.all_reduce(part.value())
            return Stream(add(residual, self._after(whole)), norm)
        if self._parallel.size == 1:
            begun = part.add_to(residual, norm)
            if isinstance(begun, WholeNorm):
                return Stream(residual, norm, done=begun.normed)
            return Stream(residual, norm, begun)
        peers = self._parallel.part(self._buffer, len(residual)) if norm.may_begin else None
        if peers is not None:
            part.value(peers.mine)
            return peers.sum(norm, residual)
        # The residual must be added once.
        summed = residual
        if self._parallel.rank == 0:
            part.add_to(summed)
        else:
            summed = part.value()
        return Stream(self._parallel.all_reduce(summed), norm)


class RowParallelLinear:
    """x W^T + b with the inputs spread over ranks.

    Each rank adds its part to the residual stream. after: a norm of the product, if the model has
    one.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        num_outputs: int,
        num_inputs: int,
        columns: range,
        parallel: Parallel,
        buffer: SumBuffer,
        *,
        bias: bool = False,
        after: RmsNorm | None = None,
    ) -> None:
        weight = weights.matrix(name, (num_outputs, num_inputs), columns=columns)
        # The bias must be added once, not once a rank.
        own_bias = weights.get(f"{name}.bias", (num_outputs,)) if bias else None
        self._linear = Linear(weight, own_bias if parallel.rank == 0 else None)
        self._sum = SumOverRanks(parallel, buffer, after)

    @property
    def may_share(self) -> bool:
        """Whether it is added in place, by kernels that leave other processors alone."""
        return self._linear.may_share and self._sum.is_in_place

    def add_to(self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm) -> Stream:
        """Return residual + x W^T + b, on its way through `norm`.

        x [T, in / size]; residual [T, out], the same on all ranks, may be written over.
        """
        return self._sum.add(residual, LinearPart(self._linear, x), norm)
