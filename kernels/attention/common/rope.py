"""The operations between the projections of a layer and its attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Operations between projections and attention: the norms of heads and the rotary embedding.

    cos, sin float32 [positions, D / 2]; norms: weights [D] of queries and keys, None where the
    model has none.
    """

    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor, Tensor] | None
    eps: float
