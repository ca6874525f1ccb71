"""Matrices of experts in codes as a GPU's kernels read them: repacked once, when they are loaded.

Words of codes are those of kernels/quantized/device_matrix.py, but for the bits of MXFP4. Its
scales stay bytes, the four of a step of 128 columns in one word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.experts.common.expert_matrix import BLOCK, ExpertMatrix
from sidestep.kernels.quantized.coded_matrix import (
    MIDDLE,
    CodedMatrix,
    Codes,
    rounded_to_bytes,
    stack,
)
from sidestep.kernels.quantized.device_matrix import STEP, DeviceMatrix, with_simple_groups

_IN_STEP = STEP // BLOCK
"""Scales of MXFP4 in a step."""
_ONE, _LARGEST = 127, 191
"""Bytes of the scales 1 and 2^64. Larger ones count as 2^64, so that kernels may divide by it."""


class Coding(NamedTuple):
    """Form of a coded matrix, a constant of the kernels."""

    kind: Codes | Literal["mxfp4"]
    height: int
    """Rows that share a scale."""
    width: int
    """Columns that share a scale, 128 for a step's word of scales; 0 where a row has one scale."""
    zeros: bool
    """Whether scales have zeros in their lowest four bits."""
    rounds: bool = False
    """Whether many rows of inputs may be rounded to e4m3, each 128 columns with a scale."""


class ExpertCodes(NamedTuple):
    """A coded matrix [N, K] of an expert; or of all experts, with their dimension first."""

    words: Tensor
    """int32 [N, K filled up to whole steps / numbers in a word]."""
    bias: Tensor | None
    """[N]"""
    scales: Tensor
    """float32 [K / width, N / height]. MXFP4 has int32 [K / 128, N], of four bytes each."""
    coding: Coding

    @property
    def num_rows(self) -> int:
        """The number of outputs."""
        return self.words.shape[-2]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory."""
        return self.words.is_meta

    @property
    def num_experts(self) -> int:
        """The number of matrices of a stack."""
        return len(self.words)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self[:3] if part is not None)

    @classmethod
    def of(cls, matrix: CodedMatrix, bias: Tensor | None = None) -> ExpertCodes:
        """Return an expert's coded matrix, in int8 if no kernel reads its form.

        Raises ValueError for groups that no kernel reads.
        """
        if matrix.kind not in ("fp8", "int8", "int4") or matrix.minimums is not None:
            matrix = rounded_to_bytes(matrix)
        matrix = _with_rows_of_its_own(with_simple_groups(matrix))
        rows, height = matrix.shape[0], matrix.group[0]
        # Kernels that take e4m3 as it is read scales of rows, or of blocks.
        if rows % height or (matrix.kind == "fp8" and matrix.group[1] >= matrix.shape[1]):
            matrix, height = matrix.with_row_scales(), 1
        if matrix.kind == "int4" and matrix.zeros is None:
            filled = torch.full_like(matrix.scales, MIDDLE, dtype=torch.uint8)
            matrix = replace(matrix, zeros=filled)
        found = DeviceMatrix.of(matrix)
        scales = found.scales
        if scales.shape[1] != rows // height:
            # A code that is NaN made scales of rows, where all of a stack have one form. So all
            # rows that share its scale become NaN.
            parts = scales.unflatten(1, (-1, height))
            scales = parts[..., 0] + 0 * parts.sum(-1)
        rounds = matrix.kind == matrix.activations == "fp8" and matrix.input_scale is None
        coding = Coding(matrix.kind, height, found.group[1], found.zeros, rounds)
        return cls(found.words, bias, scales, coding)

    @classmethod
    def of_all(cls, matrices: Sequence[CodedMatrix]) -> ExpertCodes:
        """Return several experts' coded matrices as one, repacked at once.

        That takes as many launches as one matrix: a model may have thousands. Raises ValueError
        for groups that no kernel reads, and for matrices of several forms.
        """
        count, rows = len(matrices), matrices[0].shape[0]
        words, bias, scales, coding = cls.of(stack([_with_rows_of_its_own(m) for m in matrices]))
        scales = scales.unflatten(1, (count, -1)).transpose(0, 1)
        return cls(words.unflatten(0, (count, rows)), bias, scales, coding)

    @classmethod
    def of_mxfp4(cls, matrix: ExpertMatrix) -> ExpertCodes:
        """Return an expert's matrix of MXFP4, from bytes as they are stored."""
        assert matrix.scales is not None
        rows, groups = matrix.scales.shape
        no_scales = torch.zeros(1, 1, device=matrix.values.device)
        codes = CodedMatrix(
            kind="fp4",
            codes=matrix.values,
            scales=no_scales,
            group=(rows, groups * BLOCK),
            dtype=torch.bfloat16,
        )
        bounded = matrix.scales.clamp(max=_LARGEST)
        filled = torch.nn.functional.pad(bounded, (0, -groups % _IN_STEP), value=_ONE)
        scales = filled.contiguous().view(torch.int32).t().contiguous()
        coding = Coding("mxfp4", 1, STEP, zeros=False)
        return cls(words_of_mxfp4(DeviceMatrix.of(codes).words), matrix.bias, scales, coding)

    def room_for(self, count: int) -> ExpertCodes:
        """Return memory for as many matrices like this one."""

        def room(part: Tensor) -> Tensor:
            return part.new_empty(count, *part.shape)

        bias = None if self.bias is None else room(self.bias)
        return ExpertCodes(room(self.words), bias, room(self.scales), self.coding)

    def put(self, index: int | slice, matrix: tuple[object, ...]) -> None:
        """Write one expert's matrix, or those of several, into that of all experts."""
        *parts, coding = matrix
        assert coding == self.coding, f"{coding} among {self.coding}"
        for whole, part in zip(self[:3], parts, strict=True):
            if whole is not None and isinstance(part, Tensor):
                whole[index] = part


def words_of_mxfp4(words: Tensor) -> Tensor:
    """Return the words of codes of e2m1 in an order that takes fewer instructions to decode.

    words: int32, eight codes each as in kernels/quantized/device_matrix.py: a half has four places
    of four bits, the sign first. The bits that become a bfloat16's sign, exponent and digit lie as
    far apart as they are there, so that one shift and one mask decode two numbers. Four such
    patterns do not fit into 16 bits, so the digit of the last one lies elsewhere.
    """
    same = words & 0x00770077  # the lower bits of the places 0 and 1
    signs = (words & 0x00880088) << 6
    third = (words & 0x07000700) << 2
    # Its signs change places, since the word is turned by four bits for it.
    third |= (words & 0x00000800) << 8 | (words & 0x08000000) >> 24
    last = words & -0x7FFF8000 | (words & 0x10001000) << 2 | (words & 0x60006000) >> 6
    return same | signs | third | last


def _with_rows_of_its_own(matrix: CodedMatrix) -> CodedMatrix:
    """Return a matrix whose groups have no more rows than it has."""
    height, width = matrix.group
    return replace(matrix, group=(min(height, matrix.shape[0]), width))
