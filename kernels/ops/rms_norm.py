"""RMSNorm (Zhang and Sennrich 2019), and the residual stream on its way through a norm."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.ahead import Ahead
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.native import rows as native
from sidestep.kernels.ops.silu_mul import each_row


def rms_norm(x: Tensor, weight: Tensor, eps: float, ahead: Ahead | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] of any float type; weight [D]. The norm is computed in float32 and rounded to x's
    type before the weight is applied, as in the models' training. ahead: what a GPU asks L2 for.
    """
    if on_gpu(x) and x.dim() == 2:
        from sidestep.kernels.triton.rms_norm_triton import rms_norm as launch

        return launch(x, weight, eps, ahead)
    if (made := native.rms_norm(x, weight, eps)) is not None:
        return made
    wide = x.float()
    # For a few rows, the number of operations decides the time. So the mean of squares comes from
    # the vector norm, which is a single operation.
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_epsilon(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return the norm of each head, times silu(gate), in x's type.

    x [T, H * D]; weight [D]; gate [T, H * D], whose rows may lie apart. The product is float32.
    """
    heads = rms_norm(x.unflatten(1, (-1, len(weight))), weight, eps).flatten(1)
    return (heads * each_row(torch.ops.aten.silu.out, gate.float())).to(x.dtype)


def add(x: Tensor, part: Tensor) -> Tensor:
    """Add a part, [T, D] or [D] for all rows, to the stream x [T, D] in place; return x."""
    return x if native.add(x, part) else x.add_(part)


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply the stream x [T, D] with a factor [1] in place; return x."""
    return x if native.scale(x, factor) else x.mul_(factor)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [T, N] side by side."""
    made = native.join_columns(parts)
    return torch.cat(list(parts), 1) if made is None else made


@dataclass(frozen=True)
class RmsNorm:
    """A norm with its weight [D]."""

    weight: Tensor
    """In the run's type; float32 where a checkpoint's weights are added to an offset. In a narrower
    type the sums would lose what distinguishes them from it."""
    eps: float

    @property
    def may_begin(self) -> bool:
        """Whether a product before it may compute a part of it."""
        return True

    def __call__(self, x: Tensor, ahead: Ahead | None = None) -> Tensor:
        """Return the norm of x [..., D]."""
        return rms_norm(x, self.weight, self.eps, ahead)

    def of_heads(self, x: Tensor) -> None:
        """Norm each head of x [T, H * D] in place."""
        dim = len(self.weight)
        heads = x.split(dim, 1)
        if all(native.rms_norm(head, self.weight, self.eps, out=head) is head for head in heads):
            return
        x.copy_(self(x.reshape(-1, dim)).view_as(x))


class NoNorm(RmsNorm):
    """No norm, where a model has none. Its weight has the stream's width, type and device."""

    @property
    def may_begin(self) -> bool:
        """No: there is nothing to compute."""
        return False

    def __call__(self, x: Tensor, ahead: Ahead | None = None) -> Tensor:
        """Return x."""
        return x


class BegunNorm(NamedTuple):
    """Part of the next norm that the product which wrote a stream's rows h has already computed.

    Only a scale is missing, 1 / sqrt(sum of the squares / D + eps), which is common to a row. A
    product of `weighted` and a matrix can apply it to its result.
    """

    weighted: Tensor
    """[T, D]: h * the norm's weight, in h's type."""
    squares: Tensor
    """float32 [T, P]: parts of the sum of each row's squares, one from each program that wrote h.
    """


def room_to_begin(norm: RmsNorm | None, out: Tensor, parts: int) -> BegunNorm | None:
    """Return memory for the part of the norm that programs compute who write `out` [T, D].

    parts: programs that share a row. None if there is no norm, or it computes nothing.
    """
    if norm is None or not norm.may_begin:
        return None
    squares = out.new_empty(len(out), parts, dtype=torch.float32)
    return BegunNorm(torch.empty_like(out), squares)


class QuantizedRows(NamedTuple):
    """Rows in 8 bits, as kernels/quantized/quantize_rows_triton.py makes them."""

    codes: Tensor
    """float8_e4m3fn or int8 [T, K filled up with zeros]."""
    scales: Tensor
    """float32 [T, G]: G is 1, or K / 128, rounded up."""


class WholeNorm(NamedTuple):
    """All of the next norm, computed where a stream's rows were written."""

    normed: Tensor
    """[T, D], in the stream's type."""


class DoneProduct(NamedTuple):
    """The product behind the next norm, computed where a stream's rows were written."""

    product: Tensor
    """[T, N], in the stream's type."""
    codes: Tensor
    """The matrix's codes, by which it is known."""


Begun = BegunNorm | QuantizedRows | WholeNorm | DoneProduct
"""The product before a norm may compute a part of it, or all of it, also rounded to 8 bits, or also
the product behind it."""


class Stream(NamedTuple):
    """Residual stream between two products, on its way through a norm."""

    hidden: Tensor
    """[T, D]: the stream before the norm."""
    norm: RmsNorm
    """The next norm."""
    begun: Begun | None = None
    """Part of the norm that is computed already, or its rounded result; its use is optional."""
    done: Tensor | None = None
    """[T, D]: the result of the norm, where it is computed already."""

    def normed(self, ahead: Ahead | None = None) -> Tensor:
        """Return the normed stream [T, D], computed from `hidden` unless it is done already."""
        return self.norm(self.hidden, ahead) if self.done is None else self.done

    def part(self, first: int, last: int) -> Stream:
        """Return the stream of the consecutive tokens from `first` up to, but without, `last`."""
        return Stream(
            self.hidden[first:last],
            self.norm,
            done=None if self.done is None else self.done[first:last],
        )

    def of_rows(self, rows: Tensor) -> Stream:
        """Return the stream of the tokens whose indices are in `rows`, int [R]."""
        return Stream(self.hidden.index_select(0, rows), self.norm)


def normed(x: Tensor | Stream) -> Tensor:
    """Return a stream's norm; return a tensor as it is."""
    return x.normed() if isinstance(x, Stream) else x


@functools.cache
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((1,), eps, device=device)
