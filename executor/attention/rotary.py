"""Tables of the rotary embedding for every position, scaled as config.json says."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sidestep.ipc.model.layer_spec import RopeSpec


def frequencies(rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    """Return each pair's angle per position, float32 [D / 2], and the factor on cos and sin."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scaling = rope.scaling
    if rope.rope_type == "linear":
        return inverse / scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(inverse, scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(inverse, rope, head_dim)
    return inverse, 1.0


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


class RotaryTable:
    """cos and sin of every position: [positions, D / 2], float32."""

    def __init__(self, rope: RopeSpec, head_dim: int, length: int, device: torch.device) -> None:
        """Compute the table. length: number of positions."""
        inverse, factor = frequencies(rope, head_dim)
        angles = torch.outer(
            torch.arange(length, dtype=torch.float32, device=device), inverse.to(device)
        )
        self.cos, self.sin = angles.cos() * factor, angles.sin() * factor


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
