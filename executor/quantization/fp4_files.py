"""Matrices of e2m1: MXFP4, and NVFP4, whose scales have a scale of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.quantization.stored_parts import (
    FLOATS,
    check_words,
    read_as,
    whole_groups,
)
from sidestep.executor.quantization.wide_files import WideFiles, ignore_input_scales
from sidestep.executor.weights.weight_loader import CheckpointWeights, Matrix, Wanted
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

_POWER_BIAS = 127
"""Added to the power of two that a byte of MXFP4's scales stands for."""
_PER_BYTE = 2


class ModeloptFiles(WideFiles):
    """modelopt: FP8, and NVFP4, whose second scale is a factor."""

    def read(self, files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> Matrix:
        """Return the matrix."""
        if scheme.kind != "fp4":
            return super().read(files, wanted, scheme)
        whole = _number(files, f"{wanted.name}.weight_scale_2")
        return read_fp4(files, wanted, scheme, "weight", whole)


def read_packed_fp4(files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme) -> CodedMatrix:
    """Return a matrix of compressed-tensors, whose second scale is a divisor."""
    name = f"{wanted.name}.weight_global_scale"
    whole = 1 / _number(files, name) if name in files else None
    return read_fp4(files, wanted, scheme, "weight_packed", whole)


def read_fp4(
    files: CheckpointWeights, wanted: Wanted, scheme: WeightScheme, end: str, whole: Tensor | None
) -> CodedMatrix:
    """Return a matrix. end: of the codes' name. whole: factor on all scales; None for MXFP4."""
    (rows, columns), name, width = wanted.shape, wanted.name, scheme.columns
    check_words(wanted, columns, wanted.columns, _PER_BYTE)
    bytes_ = range(wanted.columns.start // _PER_BYTE, wanted.columns.stop // _PER_BYTE)
    size = rows, columns // _PER_BYTE
    codes = read_as(files, (torch.uint8,), f"{name}.{end}", size, wanted.rows, bytes_)
    own, groups = whole_groups(wanted, width), (rows, -(-columns // width))
    kinds = (torch.uint8, torch.float8_e8m0fnu) if whole is None else (torch.float8_e4m3fn,)
    scales = read_as(files, kinds, f"{name}.weight_scale", groups, wanted.rows, own)
    if scales.dtype == torch.uint8:
        ones = torch.ones(scales.shape, device=scales.device)
        values = torch.ldexp(ones, scales.int() - _POWER_BIAS)
    else:
        values = scales.float() if whole is None else scales.float() * whole
    ignore_input_scales(files, name)
    return CodedMatrix(
        kind="fp4",
        codes=codes.contiguous(),
        scales=values.contiguous(),
        group=(1, min(width, len(wanted.columns))),
        dtype=files.dtype,
    )


def _number(files: CheckpointWeights, name: str) -> Tensor:
    """Return a tensor of one number."""
    shape = files.stored_shape(name) if name in files else ()
    return read_as(files, FLOATS, name, shape if shape == (1,) else ()).float().reshape(())
