"""Functions of a few rows by kernels in C; see rows.c. Torch's take their place elsewhere."""

from __future__ import annotations

import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from sidestep.kernels.native.library import NoLibraryError, kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Return the RMS norm of x [T, D] with a weight [D]; None where there is no kernel."""
    launch = _rms_norm(x.dtype) if _fits(x) and weight.is_contiguous() else None
    if launch is None or weight.dtype not in (x.dtype, torch.float32):
        return None
    out = x.new_empty(x.shape)
    launch(
        x.data_ptr(),
        weight.data_ptr(),
        weight.dtype == torch.float32,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        eps,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def silu_mul(both: Tensor) -> Tensor | None:
    """Return silu(gate) * up, [T, F], of [T, 2 F]; None where there is no kernel."""
    launch = _silu_mul(both.dtype) if _fits(both) else None
    if launch is None:
        return None
    rows, count = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, count)
    launch(both.data_ptr(), rows, count, both.stride(0), out.data_ptr(), torch.get_num_threads())
    return out


def _fits(x: Tensor) -> bool:
    """Return whether x is a matrix that kernels take: on a CPU, with rows without gaps.

    The answer must not depend on the number of rows, so rows may lie apart. (A single row has no
    gaps in torch's eyes.)
    """
    known = x.dtype in (torch.float32, torch.bfloat16)
    return known and x.dim() == 2 and x.device.type == "cpu" and x.stride(1) == 1


@functools.cache
def _rms_norm(dtype: torch.dtype) -> Any:
    return _found(
        "rms_norm", dtype, c_void_p, c_void_p, c_int32, *[c_int64] * 3, c_float, c_void_p, c_int32
    )


@functools.cache
def _silu_mul(dtype: torch.dtype) -> Any:
    return _found("silu_mul", dtype, c_void_p, *[c_int64] * 3, c_void_p, c_int32)


def _found(name: str, dtype: torch.dtype, *arguments: type) -> Any:
    """Return a kernel; None where it cannot be built."""
    try:
        return kernel("rows.c", name, dtype, *arguments)
    except NoLibraryError:
        return None
