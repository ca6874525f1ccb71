"""Matrices in few bits: the one form in which every file's format is kept after it is read.

w[n, k] = value(code[n, k]) * scale[n // R, k // G] - minimum[n // R, k // G]: R rows and G columns
share a scale. The last groups of a matrix may be short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

Codes = Literal["fp8", "int8", "int4", "nf4", "fp4"]
"""How codes stand for numbers.

fp8: e4m3fn. int8: themselves. int4: 0 to 15, less the group's zero. nf4: the NormalFloat of QLoRA
(Dettmers et al. 2023). fp4: e2m1 of the OCP Microscaling Formats.
"""
Rounded = Literal["fp8", "int8"]
"""Types in 8 bits that inputs may be rounded to."""
ROUNDED: dict[Rounded, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Numbers of the NormalFloat, by their codes."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of e2m1, by their codes."""
TABLES: dict[Codes, tuple[float, ...]] = {"nf4": _NF4, "fp4": _FP4}
"""Kinds of codes that are looked up -> their numbers."""
MIDDLE = 8
"""The zero of int4 where groups have none of their own."""
_LARGEST_BYTE = 127.0
"""Largest code of int8 that matrices are rounded to."""
_DECODED_AT_ONCE = 1 << 24
"""Numbers that are decoded at a time, so that the float32 values take little memory."""


@dataclass(frozen=True, kw_only=True)
class CodedMatrix:
    """A matrix [N, K] in 8 or 4 bits."""

    kind: Codes
    codes: Tensor
    """fp8: float8_e4m3fn [N, K]. int8: int8 [N, K]. Others: uint8 [N, K / 2], the first of two
    numbers in the lower half of their byte."""
    scales: Tensor
    """float32 [N / R, K / G], both rounded up."""
    group: tuple[int, int]
    """R and G: rows and columns that share a scale."""
    dtype: torch.dtype
    """Type of the inputs and results of its products."""
    zeros: Tensor | None = None
    """uint8, like the scales: the codes that stand for 0, of int4; None where all are 8."""
    minimums: Tensor | None = None
    """float32, like the scales: what is subtracted at the end."""
    activations: Rounded | None = None
    """Type that the inputs were rounded to in training or calibration, so that a product may do so
    where that is faster; None where they were not."""
    input_scale: Tensor | None = None
    """float32 [1]: the scale of rounded inputs, if it is the same for all of them."""
    may_widen: bool = False
    """Whether the files mix forms by design, so that it may get another form to be stacked."""

    @property
    def packed(self) -> int:
        """Numbers in a byte."""
        return 1 if self.kind in ("fp8", "int8") else 2

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1] * self.packed

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.codes.device

    @property
    def described(self) -> str:
        """The form in words; matrices of one form can be stacked."""
        name = f"{self.kind} in groups of {self.group[1]}"
        return name if self.activations is None else f"{name} for inputs in {self.activations}"

    def index_select(self, dim: int, rows: Tensor) -> CodedMatrix:
        """Return some rows, in this order. rows: int64. dim: 0, as of tensors."""
        assert dim == 0, "columns share bytes and scales"
        by_row = self.with_row_scales()
        return by_row._each(lambda part: part.index_select(0, rows))

    def columns(self, codes: slice, groups: slice) -> CodedMatrix:
        """Return some columns. codes: of the codes' tensor. groups: theirs."""
        parts = self._each(lambda part: part[:, groups].contiguous())
        return replace(parts, codes=self.codes[:, codes].contiguous())

    def row_parts(self, number: int) -> list[CodedMatrix]:
        """Return equal parts, of which each lies below the one before. No scale is of two parts."""
        assert self.shape[0] % (number * self.group[0]) == 0

        def cut(part: Tensor, index: int) -> Tensor:
            size = len(part) // number
            return part[index * size : (index + 1) * size]

        return [self._each(partial(cut, index=index)) for index in range(number)]

    def padded(self, rows: int) -> CodedMatrix:
        """Return the matrix with this many more rows, of zeros."""
        if not rows:
            return self

        def filled(part: Tensor) -> Tensor:
            # A scale of zero makes a zero of each code. fp8 has no padding of its own.
            more = torch.zeros(rows, part.shape[1], dtype=torch.uint8, device=part.device)
            return torch.cat([part, more.to(part.dtype)])

        return self.with_row_scales()._each(filled)

    def with_row_scales(self) -> CodedMatrix:
        """Return the matrix with scales of each row's own."""
        height, width = self.group
        if height == 1:
            return self
        rows = self.shape[0]

        def spread(part: Tensor) -> Tensor:
            return part.repeat_interleave(height, 0)[:rows]

        zeros, minimums = (
            None if part is None else spread(part) for part in (self.zeros, self.minimums)
        )
        return replace(
            self, scales=spread(self.scales), zeros=zeros, minimums=minimums, group=(1, width)
        )

    def to(self, device: torch.device) -> CodedMatrix:
        """Return the matrix on a device."""
        moved = self._each(lambda part: part.to(device))
        scale = self.input_scale
        return moved if scale is None else replace(moved, input_scale=scale.to(device))

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers [N, K], rounded once, to this type; None for the products' type."""
        dtype = self.dtype if dtype is None else dtype
        rows, columns = self.shape
        height = self.group[0]
        step = max(1, _DECODED_AT_ONCE // max(1, columns) // height) * height
        out = torch.empty(rows, columns, dtype=dtype, device=self.device)
        for first in range(0, rows, step):
            out[first : first + step] = self._values(first, min(rows, first + step))
        return out

    def _values(self, first: int, last: int) -> Tensor:
        """Return rows in float32. first: a multiple of R."""
        values = self._numbers(self.codes[first:last])
        height, width = self.group
        groups = slice(first // height, -(-last // height))

        def spread(part: Tensor) -> Tensor:
            wide = part[groups].float().repeat_interleave(width, 1)[:, : values.shape[1]]
            return wide if height == 1 else wide.repeat_interleave(height, 0)[: last - first]

        if self.kind == "int4":
            values -= MIDDLE if self.zeros is None else spread(self.zeros)
        values *= spread(self.scales)
        return values if self.minimums is None else values.sub_(spread(self.minimums))

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, in float32."""
        if self.packed == 1:
            return codes.float()
        halves = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        if self.kind == "int4":
            return halves.float()
        return torch.tensor(TABLES[self.kind], device=codes.device)[halves.int()]

    def _each(self, change: Callable[[Tensor], Tensor]) -> CodedMatrix:
        """Return the matrix with all its tensors changed."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change(self.scales),
            zeros=None if self.zeros is None else change(self.zeros),
            minimums=None if self.minimums is None else change(self.minimums),
        )


def stack(parts: Sequence[CodedMatrix]) -> CodedMatrix:
    """Return matrices of one form, one below the other. Raises ValueError for several forms."""
    first, *others = parts
    if any(part.described != first.described for part in others):
        raise ValueError("matrices of several forms cannot be stacked")
    parts = _with_offsets(parts)
    height = first.group[0]
    if any(part.group[0] != height or part.shape[0] % height for part in parts):
        parts = [part.with_row_scales() for part in parts]

    def joined(of: Callable[[CodedMatrix], Tensor | None]) -> Tensor | None:
        found = [of(part) for part in parts]
        return None if found[0] is None else torch.cat([one for one in found if one is not None])

    # A scale of all rows' inputs must reach the largest of them.
    given = [part.input_scale for part in parts]
    input_scales = [scale for scale in given if scale is not None]
    largest = torch.stack(input_scales).amax(0) if len(input_scales) == len(given) else None
    codes, scales = joined(lambda one: one.codes), joined(lambda one: one.scales)
    assert codes is not None and scales is not None
    return replace(
        parts[0],
        codes=codes,
        scales=scales,
        zeros=joined(lambda one: one.zeros),
        minimums=joined(lambda one: one.minimums),
        input_scale=largest,
    )


def widened(parts: Sequence[Tensor | CodedMatrix]) -> list[Tensor | CodedMatrix]:
    """Return matrices in one form that has all their numbers.

    It is int8 with the smallest group, or plain where a part is plain or has other codes. Each
    part's own scales are kept, so no number changes.
    """
    coded = [part for part in parts if isinstance(part, CodedMatrix)]
    same = {part.described for part in coded}
    if len(coded) == len(parts) and len(same) == 1:
        return list(parts)
    if len(coded) < len(parts) or any(part.kind not in ("int8", "int4") for part in coded):
        return [part.decoded() if isinstance(part, CodedMatrix) else part for part in parts]
    width = math.gcd(*(part.group[1] for part in coded))
    return [_as_bytes(part.with_row_scales(), width) for part in coded]


def _as_bytes(matrix: CodedMatrix, width: int) -> CodedMatrix:
    """Return a matrix of int8 with groups of this width, a divisor of its own."""
    codes, minimums = matrix.codes, matrix.minimums
    if matrix.kind == "int4":
        codes = (torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int16)).sub_(MIDDLE)
        codes = codes.to(torch.int8)
        if matrix.zeros is not None:
            shift = matrix.scales * (matrix.zeros.float() - MIDDLE)
            minimums = shift if minimums is None else minimums + shift
    repeats, columns = matrix.group[1] // width, -(-codes.shape[1] // width)

    def spread(part: Tensor) -> Tensor:
        return part.repeat_interleave(repeats, 1)[:, :columns].contiguous()

    return replace(
        matrix,
        kind="int8",
        codes=codes,
        scales=spread(matrix.scales),
        group=(1, width),
        zeros=None,
        minimums=None if minimums is None else spread(minimums),
    )


def rounded_to_bytes(matrix: CodedMatrix) -> CodedMatrix:
    """Return a matrix in int8, with scales alone, for products that read no other form of it.

    The numbers of fp4 stay as they are. Others are rounded to 255 numbers of their group, by as
    much at most as bfloat16 rounds the group's largest.
    """
    matrix = matrix.with_row_scales()
    columns = matrix.shape[1]
    width = min(matrix.group[1], columns)
    if matrix.kind == "fp4" and matrix.minimums is None:
        codes = 2 * matrix._numbers(matrix.codes)
        scales = matrix.scales / 2
    else:
        values = matrix.decoded(torch.float32)
        groups = torch.nn.functional.pad(values, (0, -columns % width)).unflatten(1, (-1, width))
        scales = groups.abs().amax(2) / _LARGEST_BYTE
        divisors = torch.where(scales == 0, 1.0, scales)[..., None]
        codes = (groups / divisors).round_().flatten(1)[:, :columns]
    return replace(
        matrix,
        kind="int8",
        codes=codes.to(torch.int8),
        scales=scales,
        group=(1, width),
        zeros=None,
        minimums=None,
    )


def _with_offsets(parts: Sequence[CodedMatrix]) -> list[CodedMatrix]:
    """Return matrices of which all have zeros or none has, and so the minimums."""
    if any(part.zeros is not None for part in parts):
        parts = [
            part
            if part.zeros is not None
            else replace(part, zeros=torch.full_like(part.scales, MIDDLE, dtype=torch.uint8))
            for part in parts
        ]
    if any(part.minimums is not None for part in parts):
        parts = [
            part
            if part.minimums is not None
            else replace(part, minimums=torch.zeros_like(part.scales))
            for part in parts
        ]
    return list(parts)


def pack_halves(codes: Tensor) -> Tensor:
    """Return codes of four bits, uint8 [N, K], two in a byte: [N, K / 2]. K is even."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
