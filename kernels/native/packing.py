"""Matrices brought into the form in which products in C read them; see packing.c."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from sidestep.kernels.native.large_pages import empty_in_large_pages
from sidestep.kernels.native.library import NoLibraryError, address, load
from sidestep.kernels.native.matrices import GROUP, PLAIN_FORMS
from sidestep.kernels.native.tape import launch

FOUR = 4
"""Bytes of a row that lie side by side."""


class _Pack(Structure):
    """Arguments of `pack` in packing.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "out")),
        *((name, c_int64) for name in ("rows", "bytes", "stride", "tile")),
        ("bits", c_int32),
    )


class _Check(Structure):
    """Arguments of `check` in packing.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("numbers", "lost")),
        *((name, c_int64) for name in ("rows", "columns", "stride")),
        ("form", c_int32),
    )


def exact_type(numbers: Tensor) -> torch.dtype:
    """Return the type of the fewest bits that keeps all numbers [N, K] as they are.

    Most checkpoints are in 16 bits, and widened for a run in float32. Without a compiler this is
    the type that they have.
    """
    if numbers.dtype != torch.float32:
        return numbers.dtype
    try:
        check = address(load("packing.c"), "check")
    except NoLibraryError:
        return numbers.dtype
    numbers = numbers if numbers.stride(1) == 1 else numbers.contiguous()
    for form, dtype in enumerate(PLAIN_FORMS[1:], 1):
        lost = c_int32()
        place = ctypes.addressof(lost)
        launch(check, _Check(numbers.data_ptr(), place, *numbers.shape, numbers.stride(0), form))
        if not lost.value:
            return dtype
    return numbers.dtype


def pack_codes(codes: Tensor, tile: int, bits: int) -> Tensor:
    """Return codes in an order for products, uint8 [tiles, groups, vectors, tile * 4].

    codes: int8 [N, K], or of 4 bits uint8 [N, K / 2], the first of two in the lower half of their
    byte. tile: rows that are multiplied together. Raises NoLibraryError.
    """
    rows, nbytes = codes.shape
    size = GROUP * bits // 8
    shape = -(-rows // tile), -(-nbytes // size), size // FOUR, tile * FOUR
    out = empty_in_large_pages(shape, torch.uint8)
    codes = codes if codes.stride(1) == 1 else codes.contiguous()
    stride = codes.stride(0)
    launch(
        address(load("packing.c"), "pack"),
        _Pack(codes.data_ptr(), out.data_ptr(), rows, nbytes, stride, tile, bits),
    )
    return out
