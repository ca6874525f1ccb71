"""Coded matrices with every code, zeros 0 and 15, and scales of 0 and powers of two, seeded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, Codes, pack_halves
from tests.triton.support import DEVICE, guarded

WHOLE = 1 << 30
"""Columns of a group that has all of them."""


@dataclass(frozen=True)
class Form:
    """A form of matrices."""

    kind: Codes
    width: int
    height: int = 1
    zeros: bool = False
    minimums: bool = False

    def __str__(self) -> str:
        width = "all" if self.width == WHOLE else self.width
        extra = "-zeros" * self.zeros + "-minimums" * self.minimums
        return f"{self.kind}-{self.height}x{width}{extra}"


FORMS = [
    Form("fp8", WHOLE),
    Form("fp8", 128, 128),
    Form("int8", WHOLE),
    Form("int4", 128),
    Form("int4", 128, zeros=True),
    Form("int4", 32, minimums=True),
    Form("fp4", 32),
    Form("nf4", 64),
]
"""Forms of the files that people serve."""
RARE_FORMS = [
    Form("fp8", WHOLE, WHOLE),
    Form("fp8", 96, 48),
    Form("int8", 32),
    Form("int8", 128, minimums=True),
    Form("int4", WHOLE, zeros=True),
    Form("int4", 256, zeros=True, minimums=True),
    Form("int4", 64, zeros=True),
    Form("int4", 16, zeros=True),
    Form("fp4", 16, 2),
]


def matrix_of(
    form: Form, rows: int, columns: int, dtype: torch.dtype, seed: int = 0
) -> CodedMatrix:
    """Return a matrix whose rows give results of about 1 in size; columns are even."""
    random = torch.Generator().manual_seed(seed + rows + columns)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    if form.kind == "fp8":
        codes = integers(0, 254, rows, columns)
        codes = (codes + (codes >= 127)).to(torch.uint8).view(torch.float8_e4m3fn)
        size = 100.0
    elif form.kind == "int8":
        codes, size = integers(-128, 128, rows, columns).to(torch.int8), 74.0
    else:
        codes = pack_halves(integers(0, 16, rows, columns).to(torch.uint8))
        size = {"int4": 6.0, "fp4": 3.0, "nf4": 0.5}[form.kind]
    height, width = min(form.height, rows), min(form.width, columns)
    groups = (-(-rows // height), -(-columns // width))
    scales = torch.rand(groups, generator=random) / (size * columns**0.5)
    scales = (scales * 4096).half().float() / 4096
    scales[:, 1::3] = 2.0 ** -round(math.log2(size * columns**0.5))
    scales[:: groups[0] // 3 + 1, -1] = 0
    zeros, minimums = None, None
    if form.zeros:
        zeros = integers(0, 16, *groups).to(torch.uint8)
        zeros[0], zeros[-1] = 0, 15
    if form.minimums:
        minimums = torch.rand(groups, generator=random) / columns**0.5
    return CodedMatrix(
        kind=form.kind,
        codes=codes.to(DEVICE),
        scales=scales.to(DEVICE),
        group=(height, width),
        dtype=dtype,
        zeros=None if zeros is None else zeros.to(DEVICE),
        minimums=None if minimums is None else minimums.to(DEVICE),
    )


def guarded_codes(parts: list[ExpertCodes]) -> ExpertCodes:
    """Return experts' matrices as one, between poisoned margins."""
    room = parts[0].room_for(len(parts))
    for index, part in enumerate(parts):
        room.put(index, part)
    words, bias, scales, coding = room
    bias = None if bias is None else guarded(bias)
    return ExpertCodes(guarded(words), bias, guarded(scales), coding)
