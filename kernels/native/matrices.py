"""Matrices as kernels in C know them: coded.h and plain.h say what the fields are."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

import torch

GROUP = 32
"""Columns of a coded matrix whose products are summed in whole numbers."""
ROUNDED_BYTES = GROUP + 8
"""Memory of a rounded group of inputs: its codes, their sum and its scale."""

PLAIN_FORMS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of plain matrices, as plain.h numbers them."""


class CodedMatrixC(Structure):
    """A matrix of 8 or 4 bits: `Matrix` in coded.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "minimums", "factors", "bias", "table")),
        *((name, c_int64) for name in ("outputs", "inputs")),
        *((name, c_int32) for name in ("bits", "repeat", "middle")),
    )


class PlainMatrixC(Structure):
    """A plain matrix: `Matrix` in plain.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs")),
        ("form", c_int32),
    )
