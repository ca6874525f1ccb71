"""Quantized matrices: where products' weights come from, and how they are read from files."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from sidestep.executor.quantization.encode import encode
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


def whole_groups(wanted: Wanted, width: int) -> range:
    """Return the groups of the columns. Raises EngineStartError if one is cut in two."""
    first, last = wanted.columns.start, wanted.columns.stop
    if first % width or (last % width and last != wanted.shape[1]):
        raise EngineStartError(
            f"tensor_parallel_size: a rank's inputs {first} to {last} of {wanted.name} cut a "
            f"group of {width} that share a scale; use fewer ranks"
        )
    return range(first // width, -(-last // width))


class QuantizedFiles(abc.ABC):
    """Reads the matrices of one method's files."""

    ends: ClassVar[tuple[str, ...]]
    """Ends of the names of tensors that only a quantized matrix has. The first one that a matrix
    has says that it is quantized."""

    @abc.abstractmethod
    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix. Raises EngineStartError, which names what is wrong."""


class CheckpointMatrices:
    """Takes the matrices of a checkpoint, of which some are quantized. See Weights.matrices."""

    def __init__(self, spec: QuantizationSpec) -> None:
        """Read what the method's files hold."""
        self._spec = spec
        self._files: QuantizedFiles = registry.load(registry.QUANTIZATIONS[spec.method].files)()

    def __call__(self, weights: Weights, wanted: Wanted) -> Matrix | None:
        """Return the matrix; None if it is not quantized."""
        assert isinstance(weights, CheckpointWeights)
        name = next((end for end in self._files.ends if f"{wanted.name}.{end}" in weights), None)
        if name is None:
            return None
        stored = weights.stored_name(f"{wanted.name}.{name}").removesuffix(f".{name}")
        scheme = self._spec.scheme(wanted.name, stored)
        if scheme is None:
            return None
        return self._files.read(weights, wanted, scheme)


class EncodedMatrices:
    """Quantizes plain matrices, one by one."""

    def __init__(self, spec: QuantizationSpec) -> None:
        self._spec = spec

    def __call__(self, weights: Weights, wanted: Wanted) -> Matrix | None:
        """Return the matrix. Ranks round alike, since each of them sees whole rows."""
        scheme = self._spec.scheme(wanted.name)
        if scheme is None:
            return None
        plain = weights.get(f"{wanted.name}.weight", wanted.shape, rows=wanted.rows)
        return part_of_columns(encode(plain, scheme), wanted)


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
    if matrix.group[1] >= wanted.shape[1]:  # one scale a row, which each rank has
        width = len(wanted.columns)
        first, last = wanted.columns.start // matrix.packed, wanted.columns.stop // matrix.packed
        part = matrix.columns(slice(first, last), slice(0, 1))
        return replace(part, group=(matrix.group[0], width))
    height, width = matrix.group
    groups = whole_groups(wanted, width)
    packed = matrix.packed
    first, last = wanted.columns.start // packed, wanted.columns.stop // packed
    return matrix.columns(slice(first, last), slice(groups.start, groups.stop))


def group_scales(
    files: CheckpointWeights, name: str, wanted: Wanted, group: tuple[int, int]
) -> tuple[Tensor, tuple[int, int]]:
    """Return the scales of the wanted part in float32, and their group.

    group: R and G. A part that begins within a group of rows gets scales of each row's own.
    """
    height, width = group
    rows, columns = wanted.shape
    shape = -(-rows // height), -(-columns // width)
    own = whole_groups(wanted, width)
    first, last = wanted.rows.start, wanted.rows.stop
    scales = files.stored(
        name, shape, rows=range(first // height, -(-last // height)), columns=own
    ).to(device=files.device, dtype=torch.float32)
    if first % height == 0:
        return scales.contiguous(), group
    spread = scales.repeat_interleave(height, 0)
    start = first % height
    return spread[start : start + len(wanted.rows)].contiguous(), (1, width)
