"""Products of chosen experts by kernels in C; see experts.c.

All that depends on the choice is in memory: which experts have tokens, how many, and where their
rows are. So the calls of a step are the same for every choice, and can be played from a tape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.native.library import address, library_of
from sidestep.kernels.native.matrices import GROUP, ROUNDED_BYTES, CodedMatrixC, PlainMatrixC
from sidestep.kernels.native.tape import empty, launch

SOURCE, CODED = "experts.c", "CODED"
"""The file of the kernels, and its definition for matrices in codes."""
_LONG = 8
"""Bytes of an int64."""


class _Order(Structure):
    """The order of pairs: `Order` in experts.c."""

    _fields_ = tuple((name, c_void_p) for name in ("used", "active", "first", "tokens", "places"))


class _Sort(Structure):
    """Arguments of `sort_pairs` in experts.c."""

    _fields_ = (
        ("ids", c_void_p),
        *((name, c_int64) for name in ("tokens", "chosen", "experts")),
        ("order", _Order),
    )


class _Products(Structure):
    """Arguments of `products` in experts.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("matrices", "order", "x", "list", "out", "memory")),
        *((name, c_int64) for name in ("rows", "stride")),
    )


class _Sum(Structure):
    """Arguments of `sum_pairs` in experts.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("results", "places", "weights", "out")),
        *((name, c_int64) for name in ("tokens", "chosen", "count", "stride")),
        ("add", c_int32),
    )


class ExpertStack:
    """The matrices of a layer's experts, of one size and form, as kernels know them."""

    def __init__(
        self,
        kernel: int,
        matrices: Sequence[CodedMatrixC | PlainMatrixC],
        kept: Sequence[Tensor],
    ) -> None:
        """Take descriptions of matrices, all coded or all plain.

        kernel: address of `products` for them. kept: the memory that they point to.
        """
        first = matrices[0]
        self.outputs, self.inputs, self.kept = int(first.outputs), int(first.inputs), tuple(kept)
        self._is_coded = isinstance(first, CodedMatrixC)
        kind: type[Structure] = type(first)
        self._described = (kind * len(matrices))(*matrices)
        self._kernel = kernel

    def __repr__(self) -> str:
        form = "coded" if self._is_coded else "plain"
        return f"ExpertStack({len(self._described)} {form}, {self.inputs} -> {self.outputs})"

    def products(self, x: Tensor, pairs: Pairs, *, of: Literal["tokens", "pairs"]) -> Tensor:
        """Return the products of all pairs [P, outputs], in the order of their experts.

        x: rows of tokens [T, inputs], or of pairs in their order [P, inputs].
        """
        out = empty((pairs.room, self.outputs), x.dtype)
        memory = self._memory(len(x), x.dtype)
        launch(
            self._kernel,
            _Products(
                ctypes.addressof(self._described),
                pairs.address,
                x.data_ptr(),
                pairs.order.tokens if of == "tokens" else None,
                out.data_ptr(),
                None if memory is None else memory.data_ptr(),
                len(x),
                x.stride(0),
            ),
        )
        return out

    def _memory(self, rows: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for the inputs as products take them."""
        if self._is_coded:
            groups = rows * -(-self.inputs // GROUP)
            return empty((groups * ROUNDED_BYTES,), torch.uint8)
        return None if dtype == torch.float32 else empty((rows, self.inputs), torch.float32)


class Pairs(NamedTuple):
    """Pairs of a token and an expert, in the order of the experts."""

    memory: Tensor
    """int64: all parts of the order, one behind the other."""
    order: _Order
    call: _Sort
    """The arguments of the call that wrote it. It keeps `order` where kernels find it."""
    chosen: int
    room: int
    """Pairs for which there is memory: all, also those with experts of other ranks."""

    @property
    def address(self) -> int:
        """Where the order is."""
        return ctypes.addressof(self.call) + _Sort.order.offset

    @property
    def used(self) -> int:
        """The address of the number of pairs that there are, int64."""
        return int(self.order.used) + _LONG


def sort_pairs(ids: Tensor, experts: int) -> Pairs:
    """Return the order of pairs. ids: int32 [T, chosen], contiguous; negative for no expert.

    experts: their number. The ids are read when a kernel runs.
    """
    tokens, chosen = ids.shape
    count = tokens * chosen
    sizes = (2, experts, experts + 1, count, count)
    memory = empty((sum(sizes),), torch.int64)
    begins = [memory.data_ptr() + _LONG * sum(sizes[:i]) for i in range(len(sizes))]
    order = _Order(*begins)
    call = _Sort(ids.data_ptr(), tokens, chosen, experts, order)
    launch(address(library_of(SOURCE, torch.float32), "sort_pairs"), call, alone=True)
    return Pairs(memory, order, call, chosen, count)


def sum_pairs(results: Tensor, pairs: Pairs, weights: Tensor, out: Tensor, *, add: bool) -> None:
    """Write each token's weighted sum of results to out [T, D], or add it.

    results: [P, D] in the order of pairs, in out's type. weights: float32 [T, chosen], contiguous.
    """
    launch(
        address(library_of(SOURCE, out.dtype), "sum_pairs"),
        _Sum(
            results.data_ptr(),
            pairs.order.places,
            weights.data_ptr(),
            out.data_ptr(),
            len(out),
            pairs.chosen,
            out.shape[1],
            out.stride(0),
            add,
        ),
    )
