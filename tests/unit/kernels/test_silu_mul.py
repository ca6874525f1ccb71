"""The gated activation against float64."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.ops.silu_mul import silu_mul


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 47), (130, 88)])
def test_close_to_exact(tokens: int, width: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(tokens, 2 * width) * 5
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(
        silu_mul(gate_up.clone()).double(), gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-6
    )


def test_bfloat16_rounds_like_the_two_separate_steps() -> None:
    torch.manual_seed(1)
    gate_up = torch.randn(9, 64).bfloat16()
    gate, up = gate_up.chunk(2, -1)
    assert torch.equal(silu_mul(gate_up.clone()), torch.nn.functional.silu(gate) * up)
