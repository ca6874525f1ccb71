"""Matrices in the forms of GPTQ and AWQ, made by hand: what tools that round never write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.quantized.written import Encoded, Encoder, seeded

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""By the place in the word: the column within the word."""


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the words of numbers along the last dimension, the lowest bits first: int32."""
    per_word = 32 // bits
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        column = place if order is None else order[place]
        words |= numbers[..., column::per_word].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


class Drawn:
    """Random codes of a matrix, with scales, zeros and groups."""

    def __init__(
        self, name: str, weight: Tensor, bits: int, width: int, *, zeros: bool, ordered: bool = True
    ) -> None:
        """Draw for a matrix [N, K]. width: of a group; -1 for K. ordered: whether k // width."""
        rows, columns = weight.shape
        draw, width = seeded(name), columns if width == -1 else width
        count = -(-columns // width)
        self.codes = torch.randint(1 << bits, (rows, columns), generator=draw)
        self.zeros = torch.full((rows, count), 1 << (bits - 1))
        if zeros:
            self.zeros = torch.randint(1 << bits, (rows, count), generator=draw)
            self.zeros[0::3, 0], self.zeros[1::3, 0] = 0, (1 << bits) - 1
        step = 0.8 / (1 << bits)
        self.scales = (step * (0.5 + torch.rand(rows, count, generator=draw))).half()
        self.scales[0, 0] = 0
        self.group_of = torch.arange(columns) // width
        if not ordered:
            self.group_of = self.group_of[torch.randperm(columns, generator=draw)]

    @property
    def numbers(self) -> Tensor:
        """The numbers that the codes stand for, float32 [N, K]."""
        zeros, scales = (one[:, self.group_of] for one in (self.zeros, self.scales.float()))
        return (self.codes - zeros).float() * scales


def gptq(
    bits: int = 4,
    width: int = 32,
    *,
    version: int = 1,
    zeros: bool = True,
    ordered: bool = True,
    has_groups: bool = True,
) -> Encoder:
    """Return an encoder of GPTQ. has_groups: whether files have g_idx."""

    def encode(name: str, weight: Tensor) -> Encoded:
        drawn = Drawn(name, weight, bits, width, zeros=zeros, ordered=ordered)
        # In the first version a zero of 0 becomes -1, whose lowest bits are all ones.
        stored = (drawn.zeros - int(version == 1)) & ((1 << bits) - 1)
        tensors = {
            "qweight": packed(drawn.codes, bits).t(),
            "qzeros": packed(stored.t(), bits),
            "scales": drawn.scales.t(),
        }
        if has_groups:
            tensors["g_idx"] = drawn.group_of.int()
        return Encoded(tensors, drawn.numbers)

    return encode


def gptq_config(bits: int = 4, width: int = 32, **others: Any) -> dict[str, Any]:
    """Return what files of GPTQ state."""
    common = {"quant_method": "gptq", "bits": bits, "group_size": width, "sym": False}
    return {**common, "desc_act": False, "lm_head": False, **others}


def awq(width: int = 32, *, zeros: bool = True) -> Encoder:
    """Return an encoder of AWQ."""

    def encode(name: str, weight: Tensor) -> Encoded:
        drawn = Drawn(name, weight, 4, width, zeros=zeros)
        tensors = {
            "qweight": packed(drawn.codes.t(), 4, _AWQ_ORDER),
            "qzeros": packed(drawn.zeros.t(), 4, _AWQ_ORDER),
            "scales": drawn.scales.t(),
        }
        return Encoded(tensors, drawn.numbers)

    return encode


def awq_config(width: int = 32, **others: Any) -> dict[str, Any]:
    """Return what files of AWQ state."""
    common = {"quant_method": "awq", "bits": 4, "group_size": width, "zero_point": True}
    return {**common, "version": "gemm", "modules_to_not_convert": None, **others}
