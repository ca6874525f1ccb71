"""Options of the compiler that the products of experts in CUDA C++ share."""

from __future__ import annotations

import torch

Activation = tuple[bool, float | None, float | None]
"""Whether it is GELU, and alpha and limit of a clamp."""


def options_of(
    dtype: torch.dtype, activation: Activation, chosen: int, *, bias: bool
) -> dict[str, int | str]:
    """Return the options for a type of results, an activation and the experts of a token."""
    gelu, alpha, limit = activation
    return {
        "HALF": int(dtype == torch.float16),
        "GELU": int(gelu),
        "CLAMPED": int(limit is not None),
        "ALPHA": f"{alpha or 0.0}f",
        "LIMIT": f"{limit or 0.0}f",
        "WITH_BIAS": int(bias),
        "CHOSEN": chosen,
    }
