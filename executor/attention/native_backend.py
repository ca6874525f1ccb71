"""Attention by a kernel in C: the default on a CPU whose machine has a C compiler.

One call does all that a layer's attention does: it norms and rotates heads, writes keys and values
to the cache and attends. It reads the blocks where they lie, so nothing is gathered or padded. See
kernels/native/source/attention.c. A head's keys lie in a block by dimensions, and its values by
tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import (
    AttentionBackend,
    AttentionSetup,
    Norms,
    StepBatch,
)
from sidestep.kernels.native.library import NoLibraryError, address, library_of
from sidestep.kernels.native.tape import empty, launch
from sidestep.kernels.unfinished_product import Product, finished

MOST_DIM, MOST_BLOCK = 512, 256
"""Largest head, and largest block, that the kernel takes."""
_FEWEST_NUMBERS = 16
"""Numbers of a head's keys in a block: a vector that begins there ends among the values."""


class _Layer(Structure):
    """A layer, as the kernel knows it: `Layer` in attention.c."""

    _fields_ = (
        ("cache", c_void_p),
        ("block_stride", c_int64),
        *((name, c_int32) for name in ("block_size", "heads", "kv_heads", "dim", "window")),
        ("reads_only", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("eps", c_float),
        ("norms_wide", c_int32),
    )


class _Step(Structure):
    """A step of a cache group, as the kernel knows it: `Step` in attention.c."""

    _fields_ = (
        ("tokens", c_int64),
        *((name, c_void_p) for name in ("positions", "slots", "rows", "tables")),
        ("table_stride", c_int64),
        ("apart", c_int32),
    )


class _Attend(Structure):
    """Arguments of `attend` in attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("layer", "step", "qkv")),
        ("row_stride", c_int64),
        *((name, c_void_p) for name in ("query_norm", "key_norm", "sinks", "out")),
    )


class NativeAttention(AttentionBackend):
    """Attention by a kernel in C."""

    dtypes = (torch.float32, torch.bfloat16)
    keeps_codes = False

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Return why there is no kernel."""
        if device.type != "cpu":
            return "it computes on a CPU"
        try:
            _kernel(torch.float32)  # if this can be built, so can the others
        except NoLibraryError as error:
            return str(error)
        return None

    @classmethod
    def refuses(cls, dtype: torch.dtype, head_dims: Iterable[int], block_size: int) -> str | None:
        """Return why it takes no such model, or None if it does."""
        if dtype not in cls.dtypes:
            return f"it computes in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
        if block_size > MOST_BLOCK:
            return f"it takes blocks of up to {MOST_BLOCK} tokens, not of {block_size}"
        dims = tuple(head_dims)
        if (largest := max(dims, default=0)) > MOST_DIM:
            return f"it takes heads of up to {MOST_DIM} numbers, not of {largest}"
        if (least := min(dims, default=MOST_DIM) * block_size) < _FEWEST_NUMBERS:
            return f"it takes blocks of {_FEWEST_NUMBERS} numbers a head, not of {least}"
        return None

    def __init__(self, setup: AttentionSetup) -> None:
        """Allocate the cache."""
        self._shape, self._setup = setup.shape, setup
        self._attend = _kernel(setup.dtype)
        self.cache = setup.open_memory(cleared=False)
        self._tables = [(table.cos.contiguous(), table.sin.contiguous()) for table in setup.rotary]
        self._layers = [self._layer(layer) for layer in range(setup.shape.num_layers)]
        self._groups = [setup.shape.place(layer).group for layer in range(setup.shape.num_layers)]
        self._steps = [_Step() for _ in range(setup.shape.num_groups)]
        """The step of each cache group. It stays where it is, for calls that are made again."""
        self._kept: tuple[Any, ...] = ()
        """Memory that the steps point to."""

    def _layer(self, layer: int) -> _Layer:
        shape, setup = self._shape, self._setup
        memory = self.cache.of_layer(layer).view(setup.dtype)
        cos, sin = self._tables[shape.table(layer)]
        return _Layer(
            cache=memory.data_ptr(),
            block_stride=memory.stride(0),
            block_size=setup.block_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            dim=shape.head_dim,
            window=shape.windows[layer],
            reads_only=shape.source(layer) != layer,
            scale=shape.scale(layer),
            softcap=shape.softcap(layer) or 0.0,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            eps=setup.norm_eps,
        )

    def begin_step(self, batch: StepBatch) -> None:
        """Note where the step's tokens are."""
        host = batch.host
        assert host is not None, "this backend needs the host's view of a step"
        rows = np.repeat(np.arange(len(host.slots), dtype=np.int32), host.num_tokens)
        positions = np.ascontiguousarray(host.positions)
        slots = np.ascontiguousarray(host.slot_mapping)
        tables = np.ascontiguousarray(host.block_tables)
        self._kept = rows, positions, slots, tables
        for group, step in enumerate(self._steps):
            step.tokens = len(positions)
            step.positions = positions.ctypes.data
            step.slots = slots[group].ctypes.data
            step.rows = rows.ctypes.data
            step.tables = tables[group].ctypes.data
            step.table_stride = tables.shape[2]
            step.apart = host.num_decode_rows == len(host.slots)

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Launch a layer's attention."""
        qkv = finished(qkv)
        assert kv_scales is None, "codes are refused at the start"
        shape, known = self._shape, self._layers[layer]
        out = empty((len(qkv), shape.num_heads * shape.head_dim), qkv.dtype)
        if norms is not None:
            known.norms_wide = norms[0].dtype == torch.float32
        launch(
            self._attend,
            _Attend(
                ctypes.addressof(known),
                ctypes.addressof(self._steps[self._groups[layer]]),
                qkv.data_ptr(),
                qkv.stride(0),
                *((None, None) if norms is None else (norm.data_ptr() for norm in norms)),
                None if sinks is None else sinks.data_ptr(),
                out.data_ptr(),
            ),
        )
        return out


def _kernel(dtype: torch.dtype) -> int:
    """Return the kernel that computes in a type. Raises NoLibraryError."""
    return address(library_of("attention.c", dtype), "attend")
