"""Functions of a few rows by kernels in C; see rows.c. Torch's take their place elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from sidestep.kernels.native.library import NoLibraryError, address, library_of
from sidestep.kernels.native.tape import empty, launch

_ALONE = 1 << 15
"""Numbers up to which one thread is faster than several."""


class _Norm(Structure):
    """Arguments of `rms_norm` in rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight")),
        *((name, c_int64) for name in ("rows", "count", "stride")),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("is_wide", c_int32),
        ("eps", c_float),
    )


_SILU, _GELU, _CLAMPED = range(3)
"""Kinds of gated activations, as rows.c has them."""


class _Gated(Structure):
    """Arguments of `gated` in rows.c."""

    _fields_ = (
        ("both", c_void_p),
        *((name, c_int64) for name in ("rows", "count", "stride")),
        ("out", c_void_p),
        ("used", c_void_p),
        ("kind", c_int32),
        ("alpha", c_float),
        ("limit", c_float),
    )


class _Widened(Structure):
    """Arguments of `widen` in rows.c."""

    _fields_ = (
        ("x", c_void_p),
        *((name, c_int64) for name in ("rows", "count", "stride")),
        ("out", c_void_p),
    )


class _Factor(Structure):
    """Arguments of `sigmoid_mul` in rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "gate")),
        *((name, c_int64) for name in ("rows", "count", "stride", "gate_stride")),
        ("is_one", c_int32),
    )


class _Scale(Structure):
    """Arguments of `scale` in rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "factor")),
        *((name, c_int64) for name in ("rows", "count", "stride")),
    )


class _Copy(Structure):
    """Arguments of `copy` in rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("rows", "count", "stride", "out_stride")),
    )


class _Sum(Structure):
    """Arguments of `add` in rows.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("sum", "part")),
        *((name, c_int64) for name in ("rows", "count", "stride", "part_stride")),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor | None:
    """Return the RMS norm of x [T, D] with a weight [D]; None where there is no kernel.

    out: memory for it, which may be x.
    """
    kernel = _kernel("rms_norm", x.dtype) if _fits(x) and weight.is_contiguous() else None
    if kernel is None or weight.dtype not in (x.dtype, torch.float32):
        return None
    rows, count = x.shape
    out = empty((rows, count), x.dtype) if out is None else out
    launch(
        kernel,
        _Norm(
            x.data_ptr(),
            weight.data_ptr(),
            rows,
            count,
            x.stride(0),
            out.data_ptr(),
            out.stride(0),
            weight.dtype == torch.float32,
            eps,
        ),
        alone=rows * count < _ALONE,
    )
    return out


def silu_mul(both: Tensor, used: int | None = None) -> Tensor | None:
    """Return silu(gate) * up, [T, F], of [T, 2 F]; None where there is no kernel.

    used: the address of an int64, the number of rows that there are; None for all.
    """
    return _gated(both, used, _SILU)


def gelu_mul(both: Tensor, used: int | None = None) -> Tensor | None:
    """Return gelu(gate) * up, with GELU as tanh approximates it; None where there is no kernel.

    used: see `silu_mul`.
    """
    return _gated(both, used, _GELU)


def clamped_swiglu(
    both: Tensor, alpha: float, limit: float, used: int | None = None
) -> Tensor | None:
    """Return (up + 1) * gate * sigmoid(alpha * gate), [T, F]; None where there is no kernel.

    The gate is cut to at most `limit`, up to between -limit and limit. used: see `silu_mul`.
    """
    return _gated(both, used, _CLAMPED, alpha, limit)


def widened(x: Tensor) -> Tensor | None:
    """Return x [T, D] in float32, which is x itself if it is; None where there is no kernel."""
    if x.dtype == torch.float32:
        return x
    kernel = _kernel("widen", x.dtype) if _fits(x) else None
    if kernel is None:
        return None
    rows, count = x.shape
    out = empty((rows, count), torch.float32)
    arguments = _Widened(x.data_ptr(), rows, count, x.stride(0), out.data_ptr())
    launch(kernel, arguments, alone=rows * count < _ALONE)
    return out


def _gated(
    both: Tensor, used: int | None, kind: int, alpha: float = 1.0, limit: float = 0.0
) -> Tensor | None:
    kernel = _kernel("gated", both.dtype) if _fits(both) else None
    if kernel is None:
        return None
    rows, count = both.shape[0], both.shape[1] // 2
    out = empty((rows, count), both.dtype)
    launch(
        kernel,
        _Gated(
            both.data_ptr(),
            rows,
            count,
            both.stride(0),
            out.data_ptr(),
            used,
            kind,
            alpha,
            limit,
        ),
        alone=rows * count < _ALONE,
    )
    return out


def join_columns(parts: Sequence[Tensor]) -> Tensor | None:
    """Return parts [T, N] side by side, [T, sum of all N]; None where there is no kernel."""
    first = parts[0]
    kernel = _kernel("copy", first.dtype) if all(map(_fits, parts)) else None
    if kernel is None or any(part.dtype != first.dtype for part in parts):
        return None
    out, begin = empty((len(first), sum(part.shape[1] for part in parts)), first.dtype), 0
    for part in parts:
        own = out[:, begin : begin + part.shape[1]]
        begin += part.shape[1]
        strides = part.stride(0), out.stride(0)
        arguments = _Copy(part.data_ptr(), own.data_ptr(), *part.shape, *strides)
        launch(kernel, arguments, alone=part.numel() < _ALONE)
    return out


def scale(x: Tensor, factor: Tensor) -> bool:
    """Multiply x [T, N] with a factor, float32 [1], in place. Return False without a kernel."""
    kernel = _kernel("scale", x.dtype) if _fits(x) else None
    if kernel is None or factor.dtype != torch.float32:
        return False
    arguments = _Scale(x.data_ptr(), factor.data_ptr(), *x.shape, x.stride(0))
    launch(kernel, arguments, alone=x.numel() < _ALONE)
    return True


def sigmoid_mul(x: Tensor, gate: Tensor) -> bool:
    """Multiply x [T, N] with the sigmoid of gate, [T, N] or [T, 1], in place.

    Return False where there is no kernel.
    """
    kernel = _kernel("sigmoid_mul", x.dtype) if _fits(x) and _fits(gate) else None
    if kernel is None or x.dtype != gate.dtype:
        return False
    (rows, count), is_one = x.shape, gate.shape[1] == 1
    strides = x.stride(0), gate.stride(0)
    launch(
        kernel,
        _Factor(x.data_ptr(), gate.data_ptr(), rows, count, *strides, is_one),
        alone=rows * count < _ALONE,
    )
    return True


def add(x: Tensor, part: Tensor) -> bool:
    """Add a part, [T, D] or [D], to x [T, D] in place; return False where there is no kernel."""
    rows = part[None] if part.dim() == 1 else part
    kernel = _kernel("add", x.dtype) if _fits(x) and _fits(rows) else None
    if kernel is None or x.dtype != part.dtype:
        return False
    stride = rows.stride(0) if part.dim() == 2 else 0
    launch(
        kernel,
        _Sum(x.data_ptr(), part.data_ptr(), x.shape[0], x.shape[1], x.stride(0), stride),
        alone=x.numel() < _ALONE,
    )
    return True


def _fits(x: Tensor) -> bool:
    """Return whether x is a matrix that kernels take: on a CPU, with rows without gaps.

    The answer must not depend on the number of rows, so rows may lie apart. (A single row has no
    gaps in torch's eyes.)
    """
    known = x.dtype in (torch.float32, torch.bfloat16)
    return known and x.dim() == 2 and x.device.type == "cpu" and x.stride(1) == 1


@functools.cache
def _kernel(name: str, dtype: torch.dtype) -> int | None:
    """Return a kernel; None where it cannot be built."""
    try:
        return address(library_of("rows.c", dtype), name)
    except NoLibraryError:
        return None
