"""Tables of the rotary embedding for every position, scaled as config.json says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sidestep.ipc.model.layer_spec import RopeSpec
from sidestep.ipc.model.rope_config import QUERY_BETA, ROTATED


def frequencies(rope: RopeSpec, head_dim: int, length: int = 0) -> tuple[Tensor, float]:
    """Return each rotated pair's angle per position, float32, and the factor on cos and sin.

    Pairs behind these are not rotated.
    length: number of positions, by which LongRoPE chooses among its lists.
    """
    dims = rope.dims or head_dim
    inverse = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    scaling = rope.scaling
    if rope.rope_type == "linear":
        return inverse / scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(inverse, rope, dims)
    if rope.rope_type == "longrope":
        return _longrope(inverse, scaling, length)
    if rope.rope_type == "proportional":
        rotated = int(scaling[ROTATED] * head_dim // 2)
        return inverse[:rotated] / scaling["factor"], 1.0
    return inverse, 1.0


def _longrope(inverse: Tensor, scaling: dict[str, Any], length: int) -> tuple[Tensor, float]:
    """Return LongRoPE's angles and factor (Ding et al. 2024).

    All positions use the list for long texts if the engine's longest request is longer than the
    texts of the training, since keys in the cache cannot be rotated again.
    """
    original = scaling["original_max_position_embeddings"]
    divisors = scaling["long_factor" if length > original else "short_factor"]
    factor, attention = scaling["factor"], scaling.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse / torch.tensor(divisors, dtype=torch.float32), float(attention)


def _llama3(inverse: Tensor, scaling: dict[str, float]) -> Tensor:
    """Slow long waves by the factor, keep short ones and blend those between (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inverse / scaling["factor"] + blend * inverse


def _yarn(inverse: Tensor, rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Return YaRN's angles and factor (Peng et al. 2023).

    Dimensions that turn often within the original length keep their speed.
    """
    scaling = rope.scaling
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = (
        dimension_of(scaling.get("beta_fast") or 32),
        dimension_of(scaling.get("beta_slow") or 1),
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = _yarn_scale(factor, scaling.get("mscale"), scaling.get("mscale_all_dim"))
    return inverse / factor * ramp + inverse * (1 - ramp), float(attention)


def _yarn_scale(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def query_factors(scaling: dict[str, Any], length: int, device: torch.device) -> Tensor | None:
    """Return Llama 4's factors on queries, float32 [positions, 1].

    They grow by a step after each original length. None if no position lies behind the first.
    """
    original = scaling["original_max_position_embeddings"]
    if length <= original or scaling[QUERY_BETA] == 0:
        return None
    steps = torch.arange(length, device=device) // original
    return 1 + scaling[QUERY_BETA] * torch.log1p(steps.float())[:, None]


def pair_order(rope: RopeSpec, head_dim: int) -> Tensor | None:
    """Return the order of a head's values in which the pairs are those of the tables, int64 [D].

    The tables rotate value i with value i + D / 2, and leave the last pairs as they are where not
    the whole head is rotated. Queries and keys in another order have the same products, so a model
    whose pairs lie elsewhere has its projections' rows put into this order when they are loaded.
    Returns None if they are in this order already.
    """
    dims = rope.dims or head_dim
    if dims == head_dim and not rope.interleaved:
        return None
    rotated, rest = torch.arange(dims), torch.arange(dims, head_dim)
    firsts, seconds = (
        (rotated[0::2], rotated[1::2]) if rope.interleaved else rotated.view(2, dims // 2)
    )
    half = len(rest) // 2
    return torch.cat([firsts, rest[:half], seconds, rest[half:]])


class RotaryTable:
    """cos and sin of every position: [positions, D / 2], float32."""

    def __init__(
        self, rope: RopeSpec | None, head_dim: int, length: int, device: torch.device
    ) -> None:
        """Compute the table. length: number of positions. rope: None rotates nothing."""
        self.cos = torch.ones(length, head_dim // 2, device=device)
        self.sin = torch.zeros(length, head_dim // 2, device=device)
        self.query_factors: Tensor | None = None
        """Factors on the queries of each position, float32 [positions, 1]; None where all are 1."""
        if rope is None:
            return
        inverse, factor = frequencies(rope, head_dim, length)
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32, device=device), inverse.to(device)
        )
        self.cos[:, : len(inverse)] = angles.cos() * factor
        self.sin[:, : len(inverse)] = angles.sin() * factor
        if QUERY_BETA in rope.scaling:
            self.query_factors = query_factors(rope.scaling, length, device)


class FullRotaryTable:
    """The same table in the form of kernels.ops.rotary: for whole heads, in the heads' type."""

    def __init__(self, table: RotaryTable, dtype: torch.dtype) -> None:
        self._cos = torch.cat([table.cos, table.cos], -1).to(dtype)
        self._sin = torch.cat([-table.sin, table.sin], -1).to(dtype)

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, D] of positions [T]."""
        return self._cos.index_select(0, positions)[:, None], self._sin.index_select(0, positions)[
            :, None
        ]
