"""Plain matrices to coded ones: rounding to the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import MIDDLE, TABLES, CodedMatrix, pack_halves

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "nf4": 1.0, "fp4": 6.0}
"""Largest number that a code stands for; of int4 without zeros."""
_LEVELS = 15
"""Steps between the smallest and the largest code of four bits."""


def encode(weight: Tensor, scheme: WeightScheme) -> CodedMatrix:
    """Return a matrix [N, K] in the scheme's form, whose products have the type of `weight`.

    Scales are rounded to bfloat16 first, so that they can be kept in it without a further error.
    """
    rows, columns = weight.shape
    height, width = scheme.rows or rows, scheme.columns or columns
    groups = _in_groups(weight, height, width)
    zeros = None
    if scheme.offset:
        low = groups.amin((1, 3)).clamp(max=0)
        high = groups.amax((1, 3)).clamp(min=0)
        scales = _short((high - low) / _LEVELS)
        zeros = (-low / _divisor(scales)).round().clamp(0, _LEVELS)
    else:
        scales = _short(groups.abs().amax((1, 3)) / _LARGEST[scheme.kind])
    scaled = (groups / _divisor(scales)[:, None, :, None]).flatten(0, 1).flatten(1)
    scaled = scaled[:rows, :columns]
    if zeros is not None:
        wide = zeros.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)
        scaled = scaled + wide[:, :columns]
    return CodedMatrix(
        kind=scheme.kind,
        codes=_codes(scaled, scheme),
        scales=scales,
        group=(height, width),
        dtype=weight.dtype,
        zeros=None if zeros is None else zeros.to(torch.uint8),
    )


def _in_groups(weight: Tensor, height: int, width: int) -> Tensor:
    """Return the numbers in float32 [row groups, R, column groups, G]; short groups get zeros."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    return padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def _short(scales: Tensor) -> Tensor:
    """Return scales that bfloat16 has, none smaller than the given ones."""
    rounded = scales.bfloat16()
    larger = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, larger, rounded).float()


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales, with 1 where all numbers are 0."""
    return torch.where(scales == 0, 1.0, scales)


def _codes(scaled: Tensor, scheme: WeightScheme) -> Tensor:
    """Return the codes nearest to numbers that are divided by their scales."""
    largest = _LARGEST[scheme.kind]
    if scheme.kind == "fp8":
        return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn)
    if scheme.kind == "int8":
        return scaled.round().clamp(-largest, largest).to(torch.int8)
    if scheme.kind == "int4":
        codes = scaled.round() if scheme.offset else scaled.round() + MIDDLE
        return pack_halves(codes.clamp(0, _LEVELS).to(torch.uint8))
    numbers, order = torch.tensor(TABLES[scheme.kind], device=scaled.device).sort()
    nearest = torch.bucketize(scaled, (numbers[1:] + numbers[:-1]) / 2)
    return pack_halves(order[nearest].to(torch.uint8))
