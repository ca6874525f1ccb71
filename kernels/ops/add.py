"""Addition to rows, in place."""

from __future__ import annotations

from torch import Tensor

from sidestep.kernels.native import rows as native


def add(x: Tensor, part: Tensor) -> Tensor:
    """Add a part, [T, D] or [D] for all rows, to x [T, D] in place; return x."""
    return x if native.add(x, part) else x.add_(part)
