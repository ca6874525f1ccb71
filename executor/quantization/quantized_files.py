"""Quantized matrices: where products' weights come from, and how they are read from files."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sidestep.executor.quantization.encode import encode
from sidestep.executor.quantization.stored_parts import whole_groups
from sidestep.executor.weights.weight_loader import (
    CheckpointWeights,
    Matrices,
    Matrix,
    Wanted,
    Weights,
)
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec, WeightScheme


class QuantizedFiles(abc.ABC):
    """Reads the matrices of one method's files."""

    ends: ClassVar[tuple[str, ...]]
    """Ends of the names of tensors that only a quantized matrix has. A matrix that has one of them
    is quantized."""

    @abc.abstractmethod
    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix. Raises EngineStartError, which names what is wrong."""


class CheckpointMatrices:
    """Takes the matrices of a checkpoint, of which some are quantized. See Weights.matrices."""

    rounds: ClassVar[bool] = False

    def __init__(self, spec: QuantizationSpec) -> None:
        """Read what the method's files hold."""
        self._spec = spec
        self._files: QuantizedFiles = registry.load(registry.QUANTIZATIONS[spec.method].files)()

    def __call__(self, weights: Weights, wanted: Wanted) -> Matrix | None:
        """Return the matrix; None if it is not quantized."""
        assert isinstance(weights, CheckpointWeights)
        end = self._end(weights, wanted.name)
        if end is None:
            return None
        stored = weights.stored_name(f"{wanted.name}.{end}").removesuffix(f".{end}")
        scheme = self._spec.scheme(wanted.name, stored, stored=True)
        if scheme is None:
            raise EngineStartError(
                f"model: the checkpoint has {stored}.{end}, but its config says that {stored} is "
                "not quantized"
            )
        return self._files.read(weights, wanted, scheme)

    def together(self, weights: Weights, wanted: Sequence[Wanted]) -> None:
        """Return None: what files hold is read one by one."""

    def has(self, weights: CheckpointWeights, name: str) -> bool:
        """Return whether the checkpoint has a matrix in a quantized form."""
        return self._end(weights, name) is not None

    def _end(self, weights: CheckpointWeights, name: str) -> str | None:
        """Return the end of a name that tells that the checkpoint has a matrix quantized."""
        return next((end for end in self._files.ends if f"{name}.{end}" in weights), None)


class EncodedMatrices:
    """Quantizes plain matrices: one by one, or small ones together."""

    rounds: ClassVar[bool] = True

    def __init__(self, spec: QuantizationSpec) -> None:
        self._spec = spec

    def __call__(self, weights: Weights, wanted: Wanted) -> Matrix | None:
        """Return the matrix. Ranks round alike, since each of them sees whole rows."""
        scheme = self._spec.scheme(wanted.name)
        if scheme is None:
            return None
        plain = weights.get(f"{wanted.name}.weight", wanted.shape, rows=wanted.rows)
        return part_of_columns(encode(plain, scheme, finds_zeros=self._spec.online), wanted)

    def together(self, weights: Weights, wanted: Sequence[Wanted]) -> Sequence[Matrix] | None:
        """Return matrices of 8 bits that are rounded at once; None for others.

        Four bits are fitted by sums, whose last bits may depend on the number of rows.
        """
        first, rows = self._spec.scheme(wanted[0].name), len(wanted[0].rows)
        alike = all(self._spec.scheme(one.name) == first for one in wanted)
        if first is None or not alike or first.kind not in ("fp8", "int8"):
            return None
        if first.rows == 0 or rows % first.rows:
            return None
        plain = [weights.get(f"{one.name}.weight", one.shape, rows=one.rows) for one in wanted]
        coded = encode(torch.cat(plain), first).row_parts(len(wanted))
        return [part_of_columns(part, one) for part, one in zip(coded, wanted, strict=True)]


def matrices_of(spec: QuantizationSpec | None) -> Matrices | None:
    """Return what gives a checkpoint's matrices; None if they are plain."""
    if spec is None or spec.is_empty:
        return None
    return EncodedMatrices(spec) if spec.online else CheckpointMatrices(spec)


def made_matrices(spec: QuantizationSpec | None) -> Matrices | None:
    """Return what gives matrices that are not read from files; None if they are plain."""
    return None if spec is None or spec.is_empty else EncodedMatrices(spec)


def part_of_columns(matrix: Matrix, wanted: Wanted) -> Matrix:
    """Return the wanted columns of a matrix that has all of them."""
    if len(wanted.columns) == wanted.shape[1]:
        return matrix
    if isinstance(matrix, Tensor):
        return matrix[:, wanted.columns.start : wanted.columns.stop].contiguous()
    height, width = matrix.group
    groups, packed = whole_groups(wanted, width), matrix.packed
    if wanted.columns.start % packed or wanted.columns.stop % packed:
        raise EngineStartError(
            f"tensor_parallel_size: a rank's inputs {wanted.columns.start} to "
            f"{wanted.columns.stop} of {wanted.name} cut a byte of {packed} codes; use fewer ranks"
        )
    first, last = wanted.columns.start // packed, wanted.columns.stop // packed
    part = matrix.columns(slice(first, last), slice(groups.start, groups.stop))
    return replace(part, group=(height, min(width, len(wanted.columns))))
