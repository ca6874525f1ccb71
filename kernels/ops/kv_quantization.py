"""Keys and values as codes of 8 or 4 bits, with a scale for each token and head.

The scale of a head follows from its largest number, or is given for all tokens. So a token's codes
depend on that token alone. The scale is rounded to float16 before the codes are computed. A code
times its scale is exact in float32: all readers see the same number. KIVI (Liu et al. 2024)
quantizes values by token too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

CodeFormat = Literal["fp8", "int8", "int4"]
"""fp8 is e4m3. int4 has a zero of its own in each head, and two codes in a byte."""
CODE_TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Largest codes of the formats that are symmetric."""
MOST_CODE = 15.0
"""Largest code of int4; the smallest is 0."""
LARGEST_SCALE = 65504.0
"""Largest number of float16."""


def quantize(
    x: Tensor, code_format: CodeFormat, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes of heads x [..., D], and float16 numbers to read them with.

    The codes are [..., D] of CODE_TYPES, and the numbers [..., 1], the scales. For int4 the codes
    are [..., D / 2], with an even dimension in the lower bits of a byte and the next one above; the
    numbers are [..., 2], scale and code of zero.

    given: float16 [heads], scales that replace those of the heads x [..., heads, D], except for
    zeros among them; None for none. Numbers that are too large for a given scale get the largest
    code.
    """
    values = x.float()
    if code_format == "int4":
        low = values.amin(-1, keepdim=True).clamp_(max=0.0)
        high = values.amax(-1, keepdim=True).clamp_(min=0.0)
        scale = rounded_up((high - low) / MOST_CODE)
        zero = _rounded(_quotient(-low, scale)).clamp_(max=MOST_CODE)
        codes = _rounded(_quotient(values, scale) + zero).clamp_(0.0, MOST_CODE).to(torch.uint8)
        return codes[..., ::2] | (codes[..., 1::2] << 4), torch.cat([scale, zero], -1).half()
    largest = LARGEST[code_format]
    scale = rounded_up(values.abs().amax(-1, keepdim=True) / largest)
    if given is not None:
        scale = torch.where(given[:, None] > 0, given[:, None].float(), scale)
    codes = _quotient(values, scale).clamp_(-largest, largest)
    if code_format == "int8":
        codes = _rounded(codes)
    return codes.to(CODE_TYPES[code_format]), scale.half()


def dequantize(codes: Tensor, numbers: Tensor, code_format: CodeFormat) -> Tensor:
    """Return float32 [..., D] for what `quantize` returned."""
    numbers = numbers.float()
    if code_format == "int4":
        both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return (both.float() - numbers[..., 1:]) * numbers[..., :1]
    return codes.float() * numbers


def rounded_up(scale: Tensor) -> Tensor:
    """Return the next number of float16, as float32, so that no code is too large for its bits."""
    half = scale.clamp(max=LARGEST_SCALE).half()
    above = (half.view(torch.int16) + 1).view(torch.float16)
    is_below = (half.float() < scale) & (half < LARGEST_SCALE)
    return torch.where(is_below, above, half).float()


def _rounded(x: Tensor) -> Tensor:
    return (x + 0.5).floor_()


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, and 0 where the scale is 0 and x is too."""
    return torch.where(scale > 0, x / scale, 0.0)
