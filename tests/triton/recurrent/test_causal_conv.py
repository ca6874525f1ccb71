"""The causal convolution and the gated norm in Triton against torch."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.ops import causal_conv as reference
from sidestep.kernels.ops import rms_norm as norms
from sidestep.kernels.recurrent.causal_conv_triton import causal_conv
from sidestep.kernels.recurrent.gated_norm_triton import gated_rms_norm
from tests.recurrent.state_rows import make_rows
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_untouched,
    guarded,
    poisoned,
    same,
    unchanged,
)

Saves = dict[int, list[tuple[int, int]]]


def check(
    counts: list[int],
    begin: list[int],
    end: list[int],
    saves: Saves | None = None,
    *,
    channels: int = 40,
    kernel: int = 4,
    dtype: torch.dtype = DTYPE,
    padding: int = 0,
    drafts: dict[int, int] | None = None,
) -> None:
    values = Values(sum(counts) + channels)
    tokens = sum(counts) + padding
    x = poisoned(tokens, channels + 8, dtype=dtype)[:, :channels]
    x.copy_(values.normal(tokens, channels, dtype=dtype))
    weight = guarded(values.normal(channels, kernel, dtype=dtype))
    state = guarded(values.normal(16, channels, kernel - 1, dtype=dtype))
    after = state.cpu().clone()
    expected = reference.causal_conv(
        x.cpu(), weight.cpu(), after, make_rows(counts, begin, end, saves, drafts=drafts)
    )
    rows = make_rows(counts, begin, end, saves, DEVICE, room=padding, drafts=drafts)
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        out = causal_conv(x, weight, state, rows)
    tolerance = 4 * torch.finfo(dtype).eps
    own = slice(0, sum(counts))
    torch.testing.assert_close(out[own].cpu(), expected[own], rtol=tolerance, atol=tolerance)
    assert same(state.cpu(), after), "a state is a copy of inputs"
    if padding:
        assert_untouched(out[sum(counts) :], "outputs of padding")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 40, 130])
def test_rows_of_all_lengths(channels: int, dtype: torch.dtype) -> None:
    counts, begin, end = [1, 3, 33, 0, 8, 2], [0, -1, 1, 3, -1, 6], [0, 2, 1, 5, 4, 7]
    check(counts, begin, end, channels=channels, dtype=dtype)


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_other_sizes_of_the_kernel(kernel: int) -> None:
    check([1, 2, 40], [0, 1, -1], [0, 1, 2], {2: [(1, 5), (32, 6)]}, kernel=kernel)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 31, 32, 33, 64, 65])
def test_rows_around_the_borders_of_tiles(count: int) -> None:
    check([count], [2], [2])
    check([1, count], [0, -1], [0, 1])


def test_saves_and_shared_states() -> None:
    saves = {0: [(1, 1), (2, 2)], 1: [(1, 3), (30, 4)]}
    check([3, 40, 1], [0, 0, 0], [5, 6, -1], saves)


@pytest.mark.parametrize("begin", range(4))
@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_states_after_each_draft(kernel: int, begin: int) -> None:
    """A row begins from one of the state rows that it writes, whichever drafts were accepted."""
    saves = {2: [(1, 13)]}
    check([4, 1, 3], [begin, 4, 8], [0, 4, 8], saves, kernel=kernel, drafts={0: 3, 2: 1})
    check([8, 20], [7, -1], [0, 9], kernel=kernel, drafts={0: 7})


def test_padding_is_left_alone() -> None:
    check([1, 20, 0], [0, 1, -1], [0, 1, -1], padding=5)
    check([1, 1, 0], [0, -1, -1], [0, 1, -1], padding=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 24), (32, 128), (9, 1)])
def test_the_gated_norm(heads: int, dim: int, dtype: torch.dtype) -> None:
    values = Values(heads * dim)
    x = guarded(values.normal(5, heads * dim, dtype=dtype))
    weight = guarded(values.normal(dim, dtype=dtype))
    gate = poisoned(5, heads * dim + 7, dtype=dtype)[:, 4:-3]
    gate.copy_(values.normal(5, heads * dim, dtype=dtype, scale=3))
    with unchanged(x=x, weight=weight, gate=gate), PoisonedAllocations():
        out = gated_rms_norm(x, weight, gate, 1e-6)
    expected = norms.gated_rms_norm(x.cpu(), weight.cpu(), gate.cpu(), 1e-6)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
