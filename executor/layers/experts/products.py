"""The interface of the products with the chosen experts' matrices; each device has its own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sidestep.kernels.ops.rms_norm import Begun, RmsNorm
from sidestep.kernels.ops.routing import Routed, Undecided


class ExpertProducts(Protocol):
    """The chosen experts' products."""

    def __call__(
        self,
        x: Tensor,
        routed: Routed | Undecided,
        out: Tensor,
        *,
        add: bool,
        norm: RmsNorm | None = None,
    ) -> Begun | None:
        """Write the weighted sum of the experts' results for x [T, D] to out [T, D], or add it.

        norm: the norm that `out` goes through next. Return the part of it that is computed, or
        the product behind it, or None.
        """
