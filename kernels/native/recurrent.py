"""The gated delta net by kernels in C; see recurrent.c.

The convolution and the norm are those of all rows. The recurrence is that of rows of few tokens:
chunks of longer ones are products of matrices, which torch multiplies.
"""

from __future__ import annotations

import functools
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.native.library import NoLibraryError, address, library_of
from sidestep.kernels.native.tape import empty, launch
from sidestep.kernels.recurrent.delta_parts import DeltaWeights
from sidestep.kernels.recurrent.rows_in_c import RowsC

_MOST_DIM, _MOST_TAPS = 256, 8
"""Largest dimension of a head, and of the convolution, that kernels take."""


class _Conv(Structure):
    """Arguments of `causal_conv` in recurrent.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "x", "factors", "state", "out")),
        *((name, c_int64) for name in ("stride", "channels", "taps")),
    )


class _Delta(Structure):
    """Arguments of `delta_few` in recurrent.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "qkv", "ba", "rate", "bias", "state", "out")),
        *((name, c_int64) for name in ("stride", "heads", "key_heads", "key_dim", "value_dim")),
        ("eps", c_float),
    )


class _GatedNorm(Structure):
    """Arguments of `gated_norm` in recurrent.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "gate", "weight", "out")),
        *((name, c_int64) for name in ("tokens", "stride", "heads", "dim")),
        ("eps", c_float),
    )


class NativeDelta(NamedTuple):
    """A gated delta net for kernels in C, with its weights as they take them."""

    factors: Tensor
    """float32 [K, C]: the convolution's, the newest token's last."""
    rate: Tensor
    """float32 [Hv]: exp(a_log)."""
    weights: DeltaWeights

    @classmethod
    def of(cls, weights: DeltaWeights, key_dim: int) -> NativeDelta | None:
        """Return it; None where there are no kernels."""
        dims = max(key_dim, len(weights.norm))
        may = dims <= _MOST_DIM and weights.conv.shape[1] <= _MOST_TAPS
        if not may or weights.conv.device.type != "cpu" or _kernels(weights.conv.dtype) is None:
            return None
        factors = weights.conv.float().T.contiguous()
        return cls(factors, weights.a_log.exp(), weights)

    def convolved(self, x: Tensor, state: Tensor, rows: RowsC) -> Tensor:
        """Return what kernels.ops.causal_conv does."""
        taps, channels = self.factors.shape
        out = empty(x.shape, x.dtype)
        launch(
            self._kernel("causal_conv", x.dtype),
            _Conv(
                addressof(rows),
                x.data_ptr(),
                self.factors.data_ptr(),
                state.data_ptr(),
                out.data_ptr(),
                x.stride(0),
                channels,
                taps,
            ),
        )
        return out

    def delta_of_few(
        self, qkv: Tensor, ba: Tensor, state: Tensor, eps: float, rows: RowsC
    ) -> Tensor:
        """Return the outputs of kernels.ops.gated_delta for rows of few tokens; others' are unset.

        qkv: [T, C], contiguous. eps: added to the square of the length of queries and keys.
        """
        _, heads, key_dim, value_dim = state.shape
        out = empty((len(qkv), heads * value_dim), qkv.dtype)
        launch(
            self._kernel("delta_few", qkv.dtype),
            _Delta(
                rows=addressof(rows),
                qkv=qkv.data_ptr(),
                ba=ba.data_ptr(),
                rate=self.rate.data_ptr(),
                bias=self.weights.bias.data_ptr(),
                state=state.data_ptr(),
                out=out.data_ptr(),
                stride=ba.stride(0),
                heads=heads,
                key_heads=(qkv.shape[1] - heads * value_dim) // (2 * key_dim),
                key_dim=key_dim,
                value_dim=value_dim,
                eps=eps,
            ),
        )
        return out

    def normed(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return what kernels.ops.gated_rms_norm does."""
        dim = len(self.weights.norm)
        out = empty(x.shape, x.dtype)
        launch(
            self._kernel("gated_norm", x.dtype),
            _GatedNorm(
                x.data_ptr(),
                gate.data_ptr(),
                self.weights.norm.data_ptr(),
                out.data_ptr(),
                len(x),
                gate.stride(0),
                x.shape[1] // dim,
                dim,
                self.weights.norm_eps,
            ),
        )
        return out

    @staticmethod
    def _kernel(name: str, dtype: torch.dtype) -> int:
        kernels = _kernels(dtype)
        assert kernels is not None, "the weights' type has kernels"
        return kernels[name]


@functools.cache
def _kernels(dtype: torch.dtype) -> dict[str, int] | None:
    """Return the kernels by name; None where they cannot be built."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        library = library_of("recurrent.c", dtype)
    except NoLibraryError:
        return None
    return {name: address(library, name) for name in ("causal_conv", "delta_few", "gated_norm")}
