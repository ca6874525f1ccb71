"""Plain matrices to coded ones: rounding to the nearest code."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import (
    MIDDLE,
    ROUNDED,
    TABLES,
    CodedMatrix,
    pack_halves,
)

_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "nf4": 1.0, "fp4": 6.0}
"""Largest number that a code stands for; of int4 without zeros."""
_LEVELS = 15
"""Steps between the smallest and the largest code of four bits."""
_Fit = tuple[Tensor, ...]
_AT_ONCE = 1 << 17
"""Numbers that a CPU fits at a time."""
_RANGES = (1.0, 0.95, 0.9, 0.85)
"""Parts of a group's range that its codes may cover."""
_FITTED_RANGES = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""The same where groups have minimums."""
_REFITS = 3
"""Lines that follow the best one of the ranges."""


def encode(weight: Tensor, scheme: WeightScheme, *, finds_zeros: bool = False) -> CodedMatrix:
    """Return a matrix [N, K] in the scheme's form, whose products have the type of `weight`.

    Scales and minimums are numbers that bfloat16 has, so that they can be kept in it. finds_zeros:
    whether groups with zeros get those with the least error, rather than the middle of the codes.
    """
    rows, columns = weight.shape
    height, width = scheme.rows or rows, scheme.columns or columns
    if weight.is_meta:
        return _without_memory(weight, scheme, height, width)
    groups = _in_groups(weight, height, width)
    minimums: Tensor | None = None
    zeros: Tensor | None = None
    has_zeros = scheme.kind == "int4" and scheme.offset
    if scheme.fitted:
        codes, scales, minimums = _by_parts(_fitted, groups)
    elif has_zeros and finds_zeros:
        codes, scales, zeros = _by_parts(_with_zeros, groups)
    else:
        scales = _short(groups.abs().amax((1, 3), keepdim=True) / _LARGEST[scheme.kind])
        codes = groups / _divisor(scales)
        zeros = torch.full_like(scales, MIDDLE) if has_zeros else None
        codes = codes if scheme.kind != "int4" else codes.round_() + MIDDLE

    def by_group(part: Tensor) -> Tensor:
        return part[:, 0, :, 0].contiguous()

    return CodedMatrix(
        kind=scheme.kind,
        codes=_codes(codes.flatten(0, 1).flatten(1)[:rows, :columns], scheme),
        scales=by_group(scales),
        group=(height, width),
        dtype=weight.dtype,
        zeros=None if zeros is None else by_group(zeros).to(torch.uint8),
        minimums=None if minimums is None else by_group(minimums),
        activations=scheme.activations,
    )


def _without_memory(weight: Tensor, scheme: WeightScheme, height: int, width: int) -> CodedMatrix:
    """Return what `encode` does, in shapes alone: arithmetic would take seconds for a model."""
    rows, columns = weight.shape
    kind = scheme.kind
    if kind == "fp8" or kind == "int8":
        codes = weight.new_empty(rows, columns, dtype=ROUNDED[kind])
    else:
        codes = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
    scales = weight.new_empty(-(-rows // height), -(-columns // width), dtype=torch.float32)
    has_zeros = kind == "int4" and scheme.offset and not scheme.fitted
    return CodedMatrix(
        kind=kind,
        codes=codes,
        scales=scales,
        group=(height, width),
        dtype=weight.dtype,
        zeros=scales.to(torch.uint8) if has_zeros else None,
        minimums=scales if scheme.fitted else None,
        activations=scheme.activations,
    )


def _by_parts(fit: Callable[[Tensor], _Fit], groups: Tensor) -> _Fit:
    """Return what `fit` returns, computed on a CPU for as many rows at a time as its caches hold.

    It goes through its numbers many times.
    """
    if groups.device.type != "cpu":
        return fit(groups)
    rows = max(1, _AT_ONCE // groups[0].numel())
    return tuple(torch.cat(parts) for parts in zip(*map(fit, groups.split(rows)), strict=True))


def _fitted(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15, and the scales and minimums of groups, with little square error.

    Codes are those of several ranges about that of the numbers. Each gives a line through codes and
    numbers. The codes of the best line give the next one.
    """
    low, high = (_extreme(groups, one) for one in (torch.amin, torch.amax))
    middle, half = (low + high) / 2, (high - low) / 2
    best: _Fit = ()
    for part in _FITTED_RANGES:
        scale = half * (2 * part / _LEVELS)
        best = _better(best, _line(groups, _levels(groups, scale, half * part - middle)))
    for _ in range(_REFITS):
        best = _better(best, _line(groups, best[1]))
    _, codes, scale, minimum = best
    return codes, scale, minimum


def _line(groups: Tensor, codes: Tensor) -> _Fit:
    """Return error, codes, scale and minimum of the line with the least square error.

    It goes through numbers and the given codes, and gives them codes again.
    """
    mean = codes.mean((1, 3), keepdim=True)
    spread = codes - mean
    squares = spread.square().sum((1, 3), keepdim=True)
    scale = (spread * groups).sum((1, 3), keepdim=True) / _divisor(squares)
    scale = scale.bfloat16().float()
    minimum = (mean - MIDDLE) * scale - groups.mean((1, 3), keepdim=True)
    minimum = minimum.bfloat16().float()
    codes = _levels(groups, scale, minimum + MIDDLE * scale)
    error = ((codes - MIDDLE) * scale - minimum - groups).square_().sum((1, 3), keepdim=True)
    return error, codes, scale, minimum


def _with_zeros(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes from 0 to 15, and the scales and zeros of groups, with little square error.

    The zeros are codes, and tried are those that are nearest to a range a little smaller than that
    of the numbers. Then the scale is that with the least square error, and gives the codes again.
    """
    low, high = _extreme(groups, torch.amin).clamp_(max=0), _extreme(groups, torch.amax).clamp_(0)
    best: _Fit = ()
    for part, rounded in product(_RANGES, (torch.floor, torch.ceil)):
        scale = (high - low) * (part / _LEVELS)
        zero = rounded(_LEVELS / 2 - (low + high) / (2 * _divisor(scale))).clamp_(0, _LEVELS)
        codes = _levels(groups, scale, zero * scale)
        steps = codes - zero
        squares = steps.square().sum((1, 3), keepdim=True)
        scale = (steps * groups).sum((1, 3), keepdim=True) / _divisor(squares)
        scale = scale.bfloat16().float()
        codes = _levels(groups, scale, zero * scale)
        error = ((codes - zero) * scale - groups).square_().sum((1, 3), keepdim=True)
        best = _better(best, (error, codes, scale, zero))
    _, codes, scale, zero = best
    return codes, scale, zero


def _better(best: _Fit, found: _Fit) -> _Fit:
    """Return the fit of each group with the smaller error, the first part. `best` may be empty."""
    if not best:
        return found
    better = found[0] < best[0]
    return tuple(torch.where(better, new, old) for new, old in zip(found, best, strict=True))


def _extreme(groups: Tensor, of: Callable[..., Tensor]) -> Tensor:
    return of(groups, (1, 3), keepdim=True)


def _levels(groups: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Return the codes nearest to numbers."""
    return ((groups + minimum) / _divisor(scale)).round_().clamp_(0, _LEVELS)


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
        return pack_halves(scaled.clamp(0, _LEVELS).to(torch.uint8))
    numbers, order = torch.tensor(TABLES[scheme.kind], device=scaled.device).sort()
    nearest = torch.bucketize(scaled.contiguous(), (numbers[1:] + numbers[:-1]) / 2)
    return pack_halves(order[nearest].to(torch.uint8))
