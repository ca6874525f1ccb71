"""Gated activation of the MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native import rows as native
from sidestep.kernels.unfinished_product import UnscaledProduct, finished

_SERIAL = 1 << 15
"""Number of elements up to which torch uses a single thread, and which each thread gets at least.
"""


class GateAndUp(NamedTuple):
    """A gated activation that is still to be computed: silu(gate) * up."""

    both: Tensor | UnscaledProduct
    """[T, 2 F], contiguous, with the gate first."""

    def computed(self) -> Tensor:
        """Return the activation, [T, F]."""
        return silu_mul(finished(self.both))


def computed(x: Tensor | GateAndUp) -> Tensor:
    """Return an activation; return a tensor as it is."""
    return x.computed() if isinstance(x, GateAndUp) else x


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [T, F], for gate_up [T, 2 F] with the gate first."""
    if on_gpu(gate_up):
        from sidestep.kernels.triton.silu_mul_triton import silu_mul as launch

        return launch(gate_up)
    if (made := native.silu_mul(gate_up)) is not None:
        return made
    gate, up = gate_up.chunk(2, -1)
    return by_rows(torch.ops.aten.silu.out, gate).mul_(up)


def by_rows(activation: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the activation of x [T, F] on a CPU. activation: an operation that takes `out`.

    The bits of a row do not depend on the number of rows. torch cuts a tensor into equal parts, one
    for each thread that has enough work. It computes the last elements of a part by other
    instructions than the rest, so parts must end where rows end.
    """
    threads, rows, width = torch.get_num_threads(), x.shape[0], x.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if threads == 1 or rows == 1 or x.numel() <= _SERIAL:
        return activation(x, out=out)
    # Each thread gets the same number of rows, enough to be worth a thread. The remaining rows are
    # computed in pieces that one thread computes.
    shared = rows - rows % (threads * -(-_SERIAL // width))
    few = max(1, _SERIAL // width)
    cuts = [*([0] if shared else []), *range(shared, rows, few), rows]
    for first, last in zip(cuts, cuts[1:], strict=False):
        activation(x[first:last], out=out[first:last])
    return out


def each_row(activation: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return the activation of x [T, F], as `by_rows`, where rows may lie side by side."""
    # A column between the rows makes torch compute each row by itself.
    return by_rows(activation, torch.nn.functional.pad(x, (0, 1))[:, :-1])


def sigmoid_mul(x: Tensor, gate: Tensor) -> None:
    """Multiply x [T, N] with the sigmoid of gate, [T, N] or on a CPU [T, 1], in place.

    The sigmoid is rounded to x's type. The rows of both may lie apart.
    """
    if on_gpu(x):
        from sidestep.kernels.triton.sigmoid_mul_triton import sigmoid_mul as launch

        launch(x, gate)
    elif not native.sigmoid_mul(x, gate):
        x.mul_(row_sigmoid(gate))


def row_sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [T, N], where a row's bits depend on that row alone."""
    return torch.sigmoid(x) if on_gpu(x) else each_row(torch.ops.aten.sigmoid.out, x)
