"""The expert that takes every token: by itself, or as one more of the experts that are chosen."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sidestep.executor.layers.linear import Linear, column_parallel
from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.ops.silu_mul import sigmoid_mul
from sidestep.kernels.quantized.coded_matrix import CodedMatrix


class ExpertWeights(Protocol):
    """Loads the matrices of a rank's experts, or its part of them."""

    spec: ExpertsSpec
    experts: range
    """Numbers in the model of this rank's experts."""

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the gate's matrix over the other's, [2 F, D]. expert: its number in the model."""

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the matrix [D, F]."""


def expert_matrix(matrix: Matrix) -> ExpertMatrix | CodedMatrix:
    """Return an expert's matrix: one in the run's type as a GPU's kernels take it."""
    return ExpertMatrix(matrix) if isinstance(matrix, Tensor) else matrix


class SharedMatrices:
    """Loads a rank's part of the shared expert's matrices."""

    def __init__(
        self, spec: ExpertsSpec, hidden_size: int, weights: Weights, name: str, parallel: Parallel
    ) -> None:
        """Read from `weights`. name: the beginning of the names of the layer's parts."""
        self._weights, self._name = weights, f"{name}.{spec.names.shared}"
        self._width, self._hidden_size = spec.shared_width, hidden_size
        self._part = parallel.share(spec.shared_width)

    def gate_up(self) -> Linear:
        """Return the product with the gate's matrix over the other's."""
        parts = [(f"{self._name}.{one}_proj", self._width, self._part) for one in ("gate", "up")]
        return column_parallel(self._weights, parts, self._hidden_size)

    def stacked_gate_up(self) -> Matrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        shape = self._width, self._hidden_size
        names = [f"{self._name}.{one}_proj" for one in ("gate", "up")]
        return stacked({one: self._weights.matrix(one, shape, rows=self._part) for one in names})

    def down(self) -> Matrix:
        """Return the matrix [D, F]."""
        shape = self._hidden_size, self._width
        return self._weights.matrix(f"{self._name}.down_proj", shape, columns=self._part)

    def gate(self) -> Matrix:
        """Return the matrix [1, D] of the expert's own gate."""
        return self._weights.matrix(f"{self._name}_gate", (1, self._hidden_size))


class SharedExpert:
    """The expert that takes every token, by itself."""

    def __init__(self, spec: ExpertsSpec, matrices: SharedMatrices) -> None:
        self._activation = spec.activation
        self._gate_up = matrices.gate_up()
        self.down = Linear(matrices.down())
        self._own_gate = Linear(matrices.gate()) if spec.shared_gate else None

    def inner(self, x: Tensor) -> Tensor:
        """Return what `down` multiplies, [T, F], for x [T, D]."""
        gated = self._gate_up.gated(x, self._activation)
        if self._own_gate is None:
            return gated
        factor = self._own_gate(x)
        # The factor is common to a row, so that it may come before the product.
        if on_gpu(gated):
            return gated.mul_(torch.sigmoid(factor))
        sigmoid_mul(gated, factor)
        return gated


class JoinedExperts:
    """Loads experts, and behind them the shared one as one more that each token has.

    One row's products with it are small: as kernels of their own they take some 3 us each, however
    fast they read.
    """

    def __init__(self, loaded: ExpertWeights, shared: SharedMatrices) -> None:
        """Join experts that are alike (see `may_join`)."""
        self.spec, self._loaded, self._shared = loaded.spec, loaded, shared
        self.experts = range(loaded.spec.num_experts + 1)

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        if expert < self.spec.num_experts:
            return self._loaded.gate_up(expert)
        return expert_matrix(self._shared.stacked_gate_up())

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the matrix [D, F]."""
        if expert < self.spec.num_experts:
            return self._loaded.down(expert)
        return expert_matrix(self._shared.down())


def may_join(loaded: ExpertWeights, shared: SharedMatrices) -> bool:
    """Return whether the shared expert can be one more expert: its matrices are stored alike."""
    spec = loaded.spec
    if spec.shared_width != spec.width or spec.stored != "apart" or spec.whole:
        return False
    if spec.norms is not None or spec.routing.expert_scales or spec.routing.norm:
        return False
    first = loaded.experts.start
    return _are_alike(loaded.gate_up(first), shared.stacked_gate_up()) and _are_alike(
        loaded.down(first), shared.down()
    )


def _are_alike(expert: ExpertMatrix | CodedMatrix, matrix: Matrix) -> bool:
    """Return whether matrices may lie in one stack."""
    other = expert_matrix(matrix)
    if isinstance(expert, ExpertMatrix) or isinstance(other, ExpertMatrix):
        return type(expert) is type(other) and expert.shape == other.shape
    forms = [
        (m.described, m.shape, m.group, m.scales.shape, m.zeros is None, m.minimums is None)
        for m in (expert, other)
    ]
    return forms[0] == forms[1]


def gate_row(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Return the matrix [1, D] of a gate in the run's type."""
    return matrix.decoded(dtype) if isinstance(matrix, CodedMatrix) else matrix
