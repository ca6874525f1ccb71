"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    x [..., D] of any float type; weight [D]. Computed in float32 and rounded to x's type before the
    weight is applied, as the models were trained.
    """
    if on_gpu(x) and x.dim() == 2:
        from sidestep.kernels.triton.rms_norm_triton import rms_norm as launch

        return launch(x, weight, eps)
    wide = x.float()
    # The fewest operations count for a few rows: the mean of squares comes from the norm, which is
    # a single one.
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(_epsilon(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


@dataclass(frozen=True)
class RmsNorm:
    """A norm with its weight [D]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class BegunNorm(NamedTuple):
    """What the product that wrote a stream's rows h did of their norm: all but a scale that is
    common to a row, which whoever multiplies `weighted` by a matrix can apply to the result: 1 /
    sqrt(sum of the squares / D + eps).
    """

    weighted: Tensor
    """[T, D] h * the norm's weight, in h's type."""
    squares: Tensor
    """float32 [T, P] Parts of the sum of each row's squares, one from each program that wrote h."""


class Stream(NamedTuple):
    """The residual stream between two products, on its way through a norm."""

    hidden: Tensor
    """[T, D]"""
    norm: RmsNorm
    """The one that comes next."""
    begun: BegunNorm | None = None
    """What is already done of it; it need not be used."""
    done: Tensor | None = None
    """[T, D] All of it, where that is done."""

    def normed(self) -> Tensor:
        """[T, D]; from the beginning, unless it is done."""
        return self.norm(self.hidden) if self.done is None else self.done

    def part(self, first: int, last: int) -> Stream:
        """The stream of consecutive tokens."""
        return Stream(
            self.hidden[first:last],
            self.norm,
            done=None if self.done is None else self.done[first:last],
        )

    def of_rows(self, rows: Tensor) -> Stream:
        """The stream of some tokens alone, int [R]."""
        return Stream(self.hidden.index_select(0, rows), self.norm)


def normed(x: Tensor | Stream) -> Tensor:
    """A stream's norm; anything else as it is."""
    return x.normed() if isinstance(x, Stream) else x


@functools.cache
def _epsilon(eps: float, device: torch.device) -> Tensor:
    return torch.full((1,), eps, device=device)
