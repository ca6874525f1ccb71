"""The forms of a matrix, and what multiplies with each of them on each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sidestep.executor.layers.coded_gpu_matrix import CodedGpuMatrix
from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.executor.weights.weight_loader import Matrix
from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm, Stream, add, normed
from sidestep.kernels.ops.silu_mul import GateAndUp, computed, silu_mul
from sidestep.kernels.products.linear import (
    add_linear,
    gated_linear,
    linear,
    unfinished_linear,
)
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, stack, widened
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from sidestep.kernels.unfinished_product import PendingProduct, Product


class MatrixProduct(Protocol):
    """Multiplies with a matrix, and adds a bias. See Linear."""

    @property
    def kind(self) -> str:
        """The form that the matrix is kept in, for messages."""

    @property
    def codes(self) -> DeviceMatrix | None:
        """The matrix, if it is coded and on a GPU, and there is no bias."""

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Return the product [T, N]. out: memory for it, on a GPU only."""

    def unfinished(self, x: Tensor | Stream) -> Product:
        """Return the product, or what is left of it to the kernel that reads it next."""

    def gated(self, x: Tensor | Stream) -> Tensor | GateAndUp:
        """Return silu(gate) * up of the halves of the product."""

    def add_to(self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm | None) -> Begun | None:
        """Add the product to residual, in place."""


def product_of(matrix: Matrix, bias: Tensor | None) -> MatrixProduct:
    """Return what multiplies with a matrix."""
    if isinstance(matrix, CodedMatrix):
        on = on_gpu(matrix.codes)
        return CodedGpuMatrix(matrix, bias) if on else CpuMatrix(matrix, bias)
    return GpuMatrix(matrix, bias) if on_gpu(matrix) else CpuMatrix(matrix, bias)


def may_stack(parts: Sequence[Matrix]) -> bool:
    """Return whether `stacked` takes these matrices."""
    widen = any(isinstance(part, CodedMatrix) and part.may_widen for part in parts)
    return widen or len({_form(part) for part in parts}) == 1


def stacked(parts: Mapping[str, Matrix]) -> Matrix:
    """Return matrices, one below the other.

    parts: by names for messages. Raises EngineStartError for matrices that are quantized in several
    ways, unless their files mix them by design.
    """
    if any(isinstance(part, CodedMatrix) and part.may_widen for part in parts.values()):
        parts = dict(zip(parts, widened(list(parts.values())), strict=True))
    whole = [part for part in parts.values() if isinstance(part, Tensor)]
    if len(whole) == len(parts):
        return torch.cat(whole)
    coded = [part for part in parts.values() if isinstance(part, CodedMatrix)]
    first, first_form = next((name, _form(part)) for name, part in parts.items())
    for name, part in parts.items():
        if (form := _form(part)) != first_form:
            raise EngineStartError(
                f"model: {first} is {first_form}, but {name} is {form}; matrices that are "
                "multiplied at once must be quantized alike"
            )
    return stack(coded)


def _form(matrix: Matrix) -> str:
    """Return how a matrix is quantized, for messages and comparisons."""
    return "not quantized" if isinstance(matrix, Tensor) else matrix.described


class GpuMatrix:
    """A matrix in the run's type, on a GPU."""

    kind = "plain"
    codes = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Return the product."""
        return linear(x, self._weight, self._bias, out)

    def unfinished(self, x: Tensor | Stream) -> Tensor | PendingProduct:
        """Return the product, or what it consists of if its reader may compute it."""
        return unfinished_linear(x, self._weight, self._bias)

    def gated(self, x: Tensor | Stream) -> Tensor:
        """Return silu(gate) * up of the halves of the product."""
        return gated_linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm | None) -> Begun | None:
        """Add the product to residual, in place."""
        begun = norm if norm is not None and norm.may_begin else None
        return add_linear(residual, computed(x), self._weight, self._bias, begun)


class CpuMatrix:
    """A matrix on a CPU, plain or quantized."""

    codes = None

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        self._product = CpuProduct(matrix)
        self._bias = bias

    @property
    def kind(self) -> str:
        """The layout."""
        return self._product.kind

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Return the product."""
        assert out is None, "a CPU's products choose their memory themselves"
        made = self._product(normed(x))
        return made if self._bias is None else add(made, self._bias)

    def unfinished(self, x: Tensor | Stream) -> Tensor:
        """Return the product."""
        return self(x)

    def gated(self, x: Tensor | Stream) -> Tensor:
        """Return silu(gate) * up of the halves of the product."""
        return silu_mul(self(x))

    def add_to(self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm | None) -> Begun | None:
        """Add the product to residual, in place."""
        add(residual, self(computed(x)))
        return None
