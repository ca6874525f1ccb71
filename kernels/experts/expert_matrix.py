"""Matrices of experts in the forms in which they are kept, and their decoding.

MXFP4 (OCP Microscaling Formats, 2023) keeps a number in four bits, e2m1: a sign, two bits of
exponent and one of mantissa. Each 32 numbers along the inputs share a scale, a power of two, which
is kept as one byte with the bias 127. The first of two numbers has the lower half of their byte.

FP8, INT8 and INT4 have float32 scales of groups (see kernels/quantized/coded_matrix.py). A group
has a number of rows that divides the expert's, and 16 or more columns, a power of two, or all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.gpu import gpu_of
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix
from sidestep.kernels.quantized.device_matrix import with_simple_groups, with_zeros

BLOCK = 32
"""Numbers that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1 without their sign, by their bits."""
_SCALE_BIAS = 127


def has_fp8(device: torch.device) -> bool:
    """Return whether the GPU converts FP8 by instructions of its own."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability >= _FP8


_FP8 = 89
"""Capability of the first GPUs that do so."""


class ExpertMatrix(NamedTuple):
    """A matrix [N, K] of an expert; or of all experts, with their dimension before the others."""

    values: Tensor
    """[N, K] in the type of the inputs, or float8_e4m3fn or int8; of MXFP4 and INT4, the bytes
    [N, K / 2]."""
    bias: Tensor | None = None
    """[N]"""
    scales: Tensor | None = None
    """The bytes [N, K / 32] of MXFP4, or float32 [N / R, K / G]. INT4's scales have the zeros in
    the lowest four bits, as in kernels/quantized/device_matrix.py."""

    @property
    def num_rows(self) -> int:
        """The number of outputs."""
        return self.values.shape[-2]

    @property
    def shape(self) -> tuple[int, int]:
        """N, and the columns of its values."""
        return self.values.shape[-2], self.values.shape[-1]

    @classmethod
    def of(cls, matrix: CodedMatrix, bias: Tensor | None = None) -> ExpertMatrix:
        """Return an expert's coded matrix. Raises ValueError for codes that no kernel reads."""
        if matrix.kind not in ("fp8", "int8", "int4") or matrix.minimums is not None:
            form = matrix.described + (" with minimums" if matrix.minimums is not None else "")
            raise ValueError(f"{form} is not supported for experts")
        rows, columns = matrix.shape
        matrix = with_simple_groups(matrix)
        height, width = matrix.group
        if width < columns and width & (width - 1):
            raise ValueError(f"{matrix.described} is not supported for experts")
        if rows % min(height, rows):
            matrix = matrix.with_row_scales()
        zeros = matrix.zeros
        if matrix.kind == "int4" and zeros is None:
            zeros = torch.full_like(matrix.scales, MIDDLE, dtype=torch.uint8)
        return cls(matrix.codes, bias, with_zeros(matrix.scales, zeros))

    @property
    def operand(self) -> Tensor:
        """The values as kernels take them: FP8 as bytes where the GPU has no such type."""
        if self.values.dtype != torch.float8_e4m3fn or has_fp8(self.values.device):
            return self.values
        return self.values.view(torch.uint8)

    @property
    def groups(self) -> tuple[str, int, int] | None:
        """The kind of codes, and the rows and columns of a group.

        None for other matrices, for scales of whole rows, and for FP8 that has to be decoded.
        """
        if self.scales is None:
            return None
        if self.form is None:
            return "mxfp4", 1, BLOCK
        kind, height, width = self.form
        whole = kind != "int4" and width >= self.values.shape[-1]
        return None if whole or self.operand.dtype != self.values.dtype else (kind, height, width)

    @property
    def form(self) -> tuple[str, int, int] | None:
        """The kind of codes with float32 scales, and the rows and columns of a group; else None."""
        if self.scales is None or self.scales.dtype != torch.float32:
            return None
        kinds = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}
        kind = kinds[self.values.dtype]
        columns = self.values.shape[-1] * (2 if kind == "int4" else 1)
        width, groups = 1 << (columns - 1).bit_length(), self.scales.shape[-1]
        while -(-columns // width) < groups:
            width //= 2
        return kind, self.num_rows // self.scales.shape[-2], width

    def room_for(self, count: int) -> ExpertMatrix:
        """Return memory for as many matrices like this one."""

        def room(part: Tensor) -> Tensor:
            return part.new_empty(count, *part.shape)

        bias, scales = (None if part is None else room(part) for part in (self.bias, self.scales))
        return ExpertMatrix(room(self.values), bias, scales)

    def put(self, index: int, matrix: ExpertMatrix) -> None:
        """Write one expert's matrix into that of all experts."""
        for whole, part in zip(self, matrix, strict=True):
            if whole is not None and part is not None:
                whole[index] = part

    def decoded(self, dtype: torch.dtype) -> ExpertMatrix:
        """Return the matrix with its numbers in this type."""
        if self.scales is None:
            return self
        if self.form is not None:
            return ExpertMatrix(self._scaled().to(dtype), self.bias)
        return ExpertMatrix(decode_mxfp4(self.values, self.scales).to(dtype), self.bias)

    def _scaled(self) -> Tensor:
        """Return the numbers in float32, of codes with scales in float32."""
        assert self.form is not None and self.scales is not None
        kind, height, width = self.form
        scales, numbers = self.scales, self.values.float()
        if kind == "int4":
            bits = scales.view(torch.int32)
            scales, zeros = (bits & ~15).view(torch.float32), (bits & 15).float()
            numbers = torch.stack([self.values & 15, self.values >> 4], -1).flatten(-2).float()
            numbers -= _spread(zeros, height, width)[..., : numbers.shape[-1]]
        return numbers * _spread(scales, height, width)[..., : numbers.shape[-1]]


def _spread(groups: Tensor, height: int, width: int) -> Tensor:
    """Return the value of each number's group."""
    return groups.repeat_interleave(width, -1).repeat_interleave(height, -2)


def decode_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, float32 [.., K]. values: uint8 [.., K / 2]. scales: uint8 [.., K / 32].

    All are exact, but those whose scale's byte is 255, which stands for no number.
    """
    signed = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], device=values.device)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    blocks = signed[codes.int()].unflatten(-1, (-1, BLOCK))
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _SCALE_BIAS)
    return (blocks * powers[..., None]).flatten(-2)
