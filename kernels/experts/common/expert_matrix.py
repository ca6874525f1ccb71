"""Matrices of experts as they are stored, and their decoding.

MXFP4 (OCP Microscaling Formats, 2023) keeps a number in four bits, e2m1: a sign, two bits of
exponent and one of mantissa. Each 32 numbers along the inputs share a scale, a power of two, which
is kept as one byte with the bias 127. The first of two numbers has the lower half of their byte.

A GPU's kernels read codes in another form (expert_codes.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.quantized.coded_matrix import CodedMatrix

BLOCK = 32
"""Numbers that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of e2m1 without their sign, by their bits."""
_SCALE_BIAS = 127


class ExpertMatrix(NamedTuple):
    """A matrix [N, K] of an expert; or of all experts, with their dimension before the others."""

    values: Tensor
    """[N, K] in the type of the inputs; of MXFP4, the bytes [N, K / 2]."""
    bias: Tensor | None = None
    """[N]"""
    scales: Tensor | None = None
    """The bytes [N, K / 32] of MXFP4."""

    @property
    def num_rows(self) -> int:
        """The number of outputs."""
        return self.values.shape[-2]

    @property
    def shape(self) -> tuple[int, int]:
        """N, and the columns of its values."""
        return self.values.shape[-2], self.values.shape[-1]

    @property
    def is_meta(self) -> bool:
        """Whether it has no memory."""
        return self.values.is_meta

    @property
    def num_experts(self) -> int:
        """The number of matrices of a stack."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self if part is not None)

    def room_for(self, count: int) -> ExpertMatrix:
        """Return memory for as many matrices like this one."""

        def room(part: Tensor) -> Tensor:
            return part.new_empty(count, *part.shape)

        bias, scales = (None if part is None else room(part) for part in (self.bias, self.scales))
        return ExpertMatrix(room(self.values), bias, scales)

    def put(self, index: int | slice, matrix: tuple[object, ...]) -> None:
        """Write one expert's matrix, or those of several, into that of all experts."""
        for whole, part in zip(self, matrix, strict=True):
            if whole is not None and isinstance(part, Tensor):
                whole[index] = part

    def coded(self, dtype: torch.dtype) -> Tensor | CodedMatrix:
        """Return the numbers of one expert: plain, or those of MXFP4 like other codes of 4 bits.

        dtype: the type of the products of coded ones.
        """
        if self.scales is None:
            return self.values
        return CodedMatrix(
            kind="fp4",
            codes=self.values,
            scales=_powers(self.scales),
            group=(1, BLOCK),
            dtype=dtype,
        )

    def decoded(self, dtype: torch.dtype) -> ExpertMatrix:
        """Return the matrix with its numbers in this type."""
        if self.scales is None:
            return self
        return ExpertMatrix(decode_mxfp4(self.values, self.scales).to(dtype), self.bias)


def decode_mxfp4(values: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers, float32 [.., K]. values: uint8 [.., K / 2]. scales: uint8 [.., K / 32].

    All are exact, but those whose scale's byte is 255, which stands for no number.
    """
    signed = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], device=values.device)
    codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
    blocks = signed[codes.int()].unflatten(-1, (-1, BLOCK))
    return (blocks * _powers(scales)[..., None]).flatten(-2)


def _powers(scales: Tensor) -> Tensor:
    """Return the powers of two that bytes stand for, float32."""
    return torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _SCALE_BIAS)
