"""The choice of experts by a kernel in C; see choice.c. `choose_experts` says what is chosen."""

from __future__ import annotations

import functools
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from sidestep.kernels.native.library import NoLibraryError, address, load
from sidestep.kernels.native.tape import empty, launch

_MOST = 1024
"""Most experts that the kernel takes, as choice.c has it."""
_ALONE = 8
"""Tokens up to which one thread is faster than several."""


class _Choose(Structure):
    """Arguments of `choose` in choice.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "bias", "scales", "ids", "weights")),
        *((name, c_int64) for name in ("tokens", "experts", "first", "own")),
        *(
            (name, c_int32)
            for name in ("chosen", "groups", "chosen_groups", "sigmoid", "normalised")
        ),
        ("scale", c_float),
        ("tiny", c_float),
    )


def choose(
    logits: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    own: range,
    *,
    chosen: int,
    groups: int,
    chosen_groups: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
    tiny: float,
) -> tuple[Tensor, Tensor] | None:
    """Return ids int32 [T, chosen] and weights float32 [T, chosen]; None where there is no kernel.

    logits: float32 [T, E]. bias: float32 [E]. scales: float32, of the experts in `own`, which are
    numbered from 0 on; the ids of others are -1. tiny: added to the sum that divides.
    """
    tokens, experts = logits.shape
    may_choose = experts <= _MOST and chosen <= experts // groups * chosen_groups
    kernel = _kernel() if may_choose and logits.device.type == "cpu" else None
    if kernel is None or not logits.is_contiguous():
        return None
    ids = empty((tokens, chosen), torch.int32)
    weights = empty((tokens, chosen), torch.float32)
    launch(
        kernel,
        _Choose(
            logits=logits.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            tokens=tokens,
            experts=experts,
            first=own.start,
            own=len(own),
            chosen=chosen,
            groups=groups,
            chosen_groups=chosen_groups,
            sigmoid=sigmoid,
            normalised=normalised,
            scale=scale,
            tiny=tiny,
        ),
        alone=tokens <= _ALONE,
    )
    return ids, weights


@functools.cache
def _kernel() -> int | None:
    """Return the kernel; None where it cannot be built."""
    try:
        found = load("choice.c")
        load("tape.c")
        return address(found, "choose")
    except NoLibraryError:
        return None
