"""Scales of keys and values that a checkpoint has, under the names that its tools give them."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.ops.kv_quantization import LARGEST_SCALE, rounded_up

_NAMES = (
    "{0}_scale",
    "attn.{0}_scale",
    "{0}_proj.{0}_scale",
    "qkv_proj.{0}_scale",
    "{0}_proj.output_scale",
    "kv_scale",
)
"""Names of the scale of keys or of values in a layer's attention; the first one found counts."""
_SMALLEST_SCALE = 2.0**-24
"""Smallest number of float16."""


def load_kv_scales(weights: Weights, layer: str, num_kv_heads: int, heads: range) -> Tensor:
    """Return the scales of a rank's keys, and behind them those of its values: float16 [2 KVH].

    They are 0, which stands for a scale of each token, where the checkpoint has none. A scale is
    one number for all of the layer's KV heads, or one for each of them. layer: the name of the
    layer's attention. heads: the rank's KV heads.

    Raises EngineStartError for a scale that is no positive number, and where only one of the two is
    there.
    """
    found = {one: _stored(weights, layer, one) for one in "kv"}
    if found["k"] is None and found["v"] is None:
        return torch.zeros(2 * len(heads), dtype=torch.float16, device=weights.device)
    parts = []
    for one, stored in found.items():
        if stored is None:
            raise EngineStartError(
                f"model: the checkpoint has a scale of {layer}'s keys or values alone; it lacks "
                f"{layer}.{one}_scale"
            )
        _check(*stored, num_kv_heads)
        parts.append(stored[1].expand(num_kv_heads)[heads.start : heads.stop])
    return rounded_up(torch.cat(parts)).half()


def _stored(weights: Weights, layer: str, one: str) -> tuple[str, Tensor] | None:
    """Return the name and the numbers of the scale of keys ("k") or of values ("v")."""
    for name in (f"{layer}.{pattern.format(one)}" for pattern in _NAMES):
        if (numbers := weights.numbers(name)) is not None:
            return name, numbers
    return None


def _check(name: str, scales: Tensor, num_kv_heads: int) -> None:
    """Raise EngineStartError, which names the tensor, for what are no scales."""
    if len(scales) not in (1, num_kv_heads):
        raise EngineStartError(
            f"model: {name} has {len(scales)} numbers in the checkpoint; supported are 1, and one "
            f"for each of the {num_kv_heads} KV heads"
        )
    wrong = ~((scales >= _SMALLEST_SCALE) & (scales <= LARGEST_SCALE))
    if bool(wrong.any()):
        raise EngineStartError(
            f"model: {name} is {float(scales[wrong][0]):g} in the checkpoint, which is no scale of "
            f"keys and values; a scale is from {_SMALLEST_SCALE:.0e} to {LARGEST_SCALE:.0f}"
        )
