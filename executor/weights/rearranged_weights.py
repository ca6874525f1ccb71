"""Checkpoints whose rows are stored under other names, or in another order, than layers ask for."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from sidestep.executor.weights.weight_loader import Matrix, Shape, Weights

T = TypeVar("T", Tensor, Matrix)


class StoredRows(NamedTuple):
    """Where the rows that a layer asks for are stored."""

    name: str
    """The stored matrix's."""
    num_rows: int
    """All rows of the stored matrix."""
    rows: range
    """Rows to read."""
    order: Tensor | None = None
    """int64: the wanted ones among the rows that are read; None for all of them, in their order."""


class RearrangedWeights(Weights):
    """Weights of another source, of which some are stored in another form.

    Only rows change places, so the forms of quantized matrices do not matter here.
    """

    def __init__(self, weights: Weights) -> None:
        """Read from `weights`."""
        super().__init__(weights.dtype, weights.device)
        self._weights = weights
        self._last: tuple[tuple[object, ...], Any] | None = None
        """The last rows that were read to be ordered: layers ask for parts of them in turn."""

    @abc.abstractmethod
    def place(self, name: str, rows: range, num_rows: int) -> StoredRows | None:
        """Return where rows are stored; None if they are under their own name.

        name: of the matrix or the norm, without the kind of its tensor. num_rows: all its rows.
        """

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the tensor that a layer asks for, named <...>.<part>.<kind>."""
        part, _, kind = name.rpartition(".")
        place = self.place(part, rows or range(shape[0]), shape[0])
        if place is None:
            return self._weights.get(name, shape, rows, columns)
        stored, size = f"{place.name}.{kind}", (place.num_rows, *shape[1:])
        return self._ordered(
            place,
            ("get", stored, place.rows, columns),
            lambda: self._weights.get(stored, size, place.rows, columns),
        )

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Matrix:
        """Return the matrix that a layer asks for."""
        place = self.place(name, rows or range(shape[0]), shape[0])
        if place is None:
            return self._weights.matrix(name, shape, rows, columns)
        return self._ordered(
            place,
            ("matrix", place.name, place.rows, columns),
            lambda: self._weights.matrix(
                place.name, (place.num_rows, shape[1]), place.rows, columns
            ),
        )

    def numbers(self, name: str) -> Tensor | None:
        """Return all numbers of the checkpoint's named tensor."""
        return self._weights.numbers(name)

    def exact(self, name: str, shape: Shape, rows: range | None = None) -> Tensor:
        """Return the named tensor in float32, from the checkpoint's own type."""
        return self._weights.exact(name, shape, rows)

    def _ordered(self, place: StoredRows, key: tuple[object, ...], read: Callable[[], T]) -> T:
        """Return what is read, with its rows in their order."""
        if place.order is None:
            return read()
        if self._last is None or self._last[0] != key:
            self._last = key, read()
        stored: T = self._last[1]
        return stored.index_select(0, place.order.to(stored.device))
