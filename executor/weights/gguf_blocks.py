"""Blocks of GGUF files: the bytes of rows to codes, scales and minimums, or to numbers.

A block of one type has 32 or 256 numbers. The layouts are those of ggml; see
https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.quantized.coded_matrix import MIDDLE, CodedMatrix, pack_halves

_HALF, _LARGE = 32, 256
"""Numbers of a small block, and of a large one."""


class _Codes(NamedTuple):
    """Blocks [B], taken apart into groups of G numbers: G0 groups a block."""

    codes: Tensor
    """int8 or, of 4 bits, uint8 [B, numbers of a block]."""
    scales: Tensor
    """float32 [B, G0]."""
    minimums: Tensor | None = None
    """float32 [B, G0]: what is subtracted."""
    is_short: bool = False
    """Whether codes are 0 to 15, and stand for 8 less."""


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at a byte of each block, in float32 [B, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return codes of bytes [.., n], the lower halves of all of them first: [.., 2 n]."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Return 32 bits of each block, in their order, times 16: uint8 [B, 32]."""
    bits = blocks[:, start : start + 4, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> _Codes:
    return _Codes(_nibbles(blocks[:, 2:]), _halves(blocks, 0), is_short=True)


def _q4_1(blocks: Tensor) -> _Codes:
    scales = _halves(blocks, 0)
    return _Codes(
        _nibbles(blocks[:, 4:]), scales, -_halves(blocks, 2) - MIDDLE * scales, is_short=True
    )


def _q5_0(blocks: Tensor) -> _Codes:
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16
    return _Codes(codes, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> _Codes:
    codes = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).to(torch.int8)
    return _Codes(codes, _halves(blocks, 0), -_halves(blocks, 2))


def _q8_0(blocks: Tensor) -> _Codes:
    return _Codes(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks, 0))


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and minimums of eight groups, of Q4_K and Q5_K: float32 [B, 8]."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], 1)
    minimums = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], 1)
    return scales.float() * _halves(blocks, 0), minimums.float() * _halves(blocks, 2)


def _q4_k(blocks: Tensor) -> _Codes:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _nibbles(blocks[:, 16:].unflatten(1, (4, _HALF))).flatten(1)
    return _Codes(codes, scales, minimums - MIDDLE * scales, is_short=True)


def _q5_k(blocks: Tensor) -> _Codes:
    scales, minimums = _scales_and_minimums(blocks)
    places = torch.arange(8, dtype=torch.uint8)[:, None]
    high = ((blocks[:, None, 16:48] >> places) & 1) << 4
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, _HALF))).unflatten(2, (2, _HALF)).flatten(1, 2)
    return _Codes((low | high).flatten(1).to(torch.int8), scales, minimums)


def _q6_k(blocks: Tensor) -> _Codes:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    places = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, _HALF)) >> places) & 3
    codes = (low | (high.flatten(2) << 4)).flatten(1).to(torch.int8) - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _Codes(codes, scales * _halves(blocks, 208))


_SPLIT: dict[str, Callable[[Tensor], _Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
CODED = frozenset(_SPLIT)
"""Names of the types that a CodedMatrix can hold."""


def coded(rows: Tensor, name: str, num_bytes: int, dtype: torch.dtype) -> CodedMatrix:
    """Return the matrix of some rows of whole blocks, uint8 [N, bytes of a row].

    name: of one of CODED. num_bytes: of a block. dtype: of the matrix's products.
    """
    num_rows = rows.shape[0]
    found = _SPLIT[name](rows.contiguous().view(-1, num_bytes))
    codes = found.codes.reshape(num_rows, -1)
    scales = found.scales.reshape(num_rows, -1).contiguous()
    minimums = None if found.minimums is None else found.minimums.reshape(num_rows, -1).contiguous()
    return CodedMatrix(
        kind="int4" if found.is_short else "int8",
        codes=(pack_halves(codes) if found.is_short else codes).contiguous(),
        scales=scales,
        group=(1, codes.shape[1] // scales.shape[1]),
        dtype=dtype,
        minimums=minimums,
        may_widen=True,
    )


def decoded(rows: Tensor, name: str, num_bytes: int) -> Tensor:
    """Return the numbers of some rows of whole blocks, uint8 [N, bytes of a row].

    They are float32, or of the file's type if that is plain. Raises EngineStartError if a package
    is missing, which some types need.
    """
    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if name in plain:
        return rows.contiguous().view(plain[name])
    if name in CODED:
        return coded(rows, name, num_bytes, torch.float32).decoded()
    quants = _library(name)
    array = np.ascontiguousarray(rows.numpy())
    values: Any = quants.dequantize(array, quants.GGMLQuantizationType[name])
    return torch.from_numpy(values)


def _library(name: str) -> Any:
    """Return the module of the package that decodes the types that are rare."""
    try:
        from gguf import quants
    except ImportError:
        raise EngineStartError(
            f"model: tensors of type {name} are decoded by the package gguf, which is not "
            "installed: pip install 'sidestep[gguf]'"
        ) from None
    return quants
