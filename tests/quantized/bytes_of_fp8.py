"""Matrices of FP8 with scales in the forms of several tools, made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.quantized.written import Encoded, Encoder, seeded

LARGEST = 448.0


def in_blocks(
    weight: Tensor, rows: int, columns: int, *, powers: bool = False, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, the scales of blocks, and the numbers. powers: whether scales are of two."""
    height, width = weight.shape
    scales = torch.zeros(-(-height // rows), -(-width // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = block.abs().max() / LARGEST
    scales = scales.log2().ceil().exp2() if powers else scales.to(dtype).float()
    wide = scales.repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]
    codes = (weight / wide).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes, scales.to(dtype), codes.float() * wide


def block_fp8(
    rows: int,
    columns: int,
    *,
    end: str = "weight_scale_inv",
    powers: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Encoder:
    """Return an encoder with a scale a block, as DeepSeek's and Qwen's files have them."""

    def encode(name: str, weight: Tensor) -> Encoded:
        codes, scales, numbers = in_blocks(weight, rows, columns, powers=powers, dtype=dtype)
        return Encoded({"weight": codes, end: scales}, numbers)

    return encode


def tensor_fp8(*, static: bool = False, shape: tuple[int, ...] = ()) -> Encoder:
    """Return an encoder with one scale a matrix, which differs among q, k and v."""

    def encode(name: str, weight: Tensor) -> Encoded:
        scale = weight.abs().max() / LARGEST * (1 + torch.rand((), generator=seeded(name)))
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale.reshape(shape)}
        if static:
            tensors["input_scale"] = torch.tensor(0.02).reshape(shape)
        return Encoded(tensors, codes.float() * scale)

    return encode


def row_fp8(*, dims: int = 2) -> Encoder:
    """Return an encoder with a scale a row, [N, 1] or [N]."""

    def encode(name: str, weight: Tensor) -> Encoded:
        scales = weight.abs().amax(1, keepdim=True) / LARGEST
        scales[1] = 0
        codes = (weight / scales).nan_to_num(0).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        stored = scales if dims == 2 else scales[:, 0]
        return Encoded({"weight": codes, "weight_scale": stored}, codes.float() * scales)

    return encode


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4(name: str, weight: Tensor) -> Encoded:
    """Return a matrix of NVFP4 as modelopt writes it, with random codes."""
    rows, columns = weight.shape
    draw = seeded(name)
    codes = torch.randint(16, (rows, columns), generator=draw)
    scales = (0.5 + torch.rand(rows, columns // 16, generator=draw)).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.07)
    values = torch.tensor([*_E2M1, *(-one for one in _E2M1)])[codes]
    numbers = values * (scales.float() * whole).repeat_interleave(16, 1)
    tensors = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }
    return Encoded(tensors, numbers)
