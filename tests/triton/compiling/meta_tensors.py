"""Tensors without memory, by which kernels are compiled."""

from __future__ import annotations

import torch
from torch import Tensor

TOKENS = 8192


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def f32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def u8(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def i32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
