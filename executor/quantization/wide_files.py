"""Files with a byte a number: FP8 of several tools, and whole numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from sidestep.executor.quantization.quantized_files import QuantizedFiles
from sidestep.executor.quantization.stored_parts import (
    SCALES,
    group_scales,
    read_as,
)
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

INPUT_SCALES = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "input_scale_ub",
)
"""Ends of the names of what scales a matrix's inputs."""


class WideFiles(QuantizedFiles):
    """Matrices of codes under the name of the plain ones, with scales beside them."""

    ends = ("weight_scale_inv", "weight_scale")

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix. The shape of the scales says what shares one."""
        end = next(one for one in self.ends if f"{wanted.name}.{one}" in files)
        codes = files.stored(f"{wanted.name}.weight", wanted.shape, wanted.rows, wanted.columns)
        kinds: dict[torch.dtype, str] = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}
        if kinds.get(codes.dtype) != scheme.kind:
            raise EngineStartError(
                f"model: {wanted.name}.weight is {codes.dtype} in the checkpoint, not {scheme.kind}"
            )
        scales, group = read_scales(files, f"{wanted.name}.{end}", wanted, scheme)
        input_scale = read_input_scale(files, wanted.name) if scheme.activations else None
        ignore_input_scales(files, wanted.name)
        minimums, zeros = None, f"{wanted.name}.weight_zero_point"
        if zeros in files:
            own, _ = read_scales(files, zeros, wanted, scheme, (torch.int8,))
            minimums = scales * own
        return CodedMatrix(
            kind=scheme.kind,
            codes=files.to_device(codes).contiguous(),
            scales=scales,
            group=group,
            dtype=files.dtype,
            minimums=minimums,
            activations=scheme.activations,
            input_scale=input_scale,
        )


def read_input_scale(files: CheckpointWeights, name: str) -> Tensor | None:
    """Return the one scale of a matrix's rounded inputs, float32 [1]; None if there is none."""
    for end in ("input_scale", "activation_scale"):
        if (whole := f"{name}.{end}") in files:
            shape = files.stored_shape(whole)
            if shape in ((), (1,), (1, 1)):
                return read_as(files, SCALES, whole, shape).float().reshape(1)
    return None


def ignore_input_scales(files: CheckpointWeights, name: str) -> None:
    """Allow what scales a matrix's inputs to be in the checkpoint unused."""
    files.leave(f"{name}.{one}" for one in INPUT_SCALES)


def read_scales(
    files: CheckpointWeights,
    name: str,
    wanted: Wanted,
    scheme: WeightScheme,
    types: Collection[torch.dtype] = SCALES,
) -> tuple[Tensor, tuple[int, int]]:
    """Return the scales of the wanted part in float32, and R and G. types: those of files.

    One number scales the whole matrix; one a row, in one or two dimensions, each row; and others
    the blocks that the scheme states.
    """
    rows, columns = wanted.shape
    shape = files.stored_shape(name)
    count = len(wanted.rows), len(wanted.columns)
    if shape in ((), (1,), (1, 1)) and not (scheme.rows == 1 and rows == 1):
        return read_as(files, types, name, shape).float().reshape(1, 1), count
    if shape in ((rows,), (rows, 1)):
        own = read_as(files, types, name, shape, wanted.rows).float().view(-1, 1)
        return own.contiguous(), (1, count[1])
    group = scheme.rows or rows, scheme.columns or columns
    return group_scales(files, name, wanted, group, types)
