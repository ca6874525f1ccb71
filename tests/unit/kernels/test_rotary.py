"""The rotary embedding against rotation by complex numbers in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops.rotary import apply_rotary


def tables(positions: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos and sin as the kernel wants them, and the angles [T, D / 2] in float64."""
    angles = torch.outer(positions.double(), 10000.0 ** (-torch.arange(0, dim, 2).double() / dim))
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None], angles


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.double().chunk(2, -1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 2), (1, 6, 20), (9, 3, 24), (130, 2, 80), (4, 5, 64)]
)
def test_each_pair_turns_by_its_angle(tokens: int, heads: int, dim: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, heads, dim)
    cos, sin, angles = tables(torch.randint(0, 2000, (tokens,)), dim)
    torch.testing.assert_close(
        apply_rotary(x.clone(), cos, sin).double(), rotated(x, angles), rtol=1e-5, atol=1e-5
    )


def test_a_view_into_the_fused_projection_is_read_right() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(7, 5, 12)
    cos, sin, angles = tables(torch.arange(7), 12)
    expected = rotated(qkv[:, :3], angles)
    values = qkv[:, 3:].clone()
    torch.testing.assert_close(
        apply_rotary(qkv[:, :3], cos, sin).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(qkv[:, 3:], values), "wrote outside of its heads"


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 16)
    cos, sin, _ = tables(torch.zeros(1), 16)
    assert torch.equal(apply_rotary(x.clone(), cos, sin), x)
