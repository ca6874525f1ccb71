"""The gated delta net in Triton against torch, with ragged rows, shared states and saves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops import gated_delta as reference
from sidestep.kernels.recurrent.delta_net_triton import delta_net
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.state_rows import StateRows
from tests.recurrent.state_rows import make_rows
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    PoisonedAllocations,
    Values,
    assert_untouched,
    guarded,
    needs_gpu,
    poisoned,
    same,
    unchanged,
)

STATES = 12
Saves = dict[int, list[tuple[int, int]]]


@dataclass(frozen=True)
class Heads:
    keys: int = 1
    values: int = 2
    key_dim: int = 16
    value_dim: int = 32
    kernel: int = 4


class Layer:
    """The inputs of some tokens, and the states of a few sequences."""

    def __init__(self, tokens: int, heads: Heads, dtype: torch.dtype = DTYPE) -> None:
        values = Values(tokens + heads.values)
        width = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim

        def part(columns: int, scale: float = 1.0) -> Tensor:
            # The rows of parts lie apart, as those of a larger product do.
            own = poisoned(tokens, columns + 8, dtype=dtype)[:, 3:-5]
            return own.copy_(values.normal(tokens, columns, dtype=dtype, scale=scale))

        self.projected = Projected(
            part(width), part(heads.values * heads.value_dim), part(2 * heads.values, 2.0)
        )
        self.weights = DeltaWeights(
            guarded(values.normal(width, heads.kernel, dtype=dtype)),
            torch.linspace(-6, 1, heads.values, device=DEVICE),
            values.normal(heads.values, dtype=torch.float32),
            guarded(values.normal(heads.value_dim, dtype=dtype)),
            1e-6,
        )
        shape = (STATES, heads.values, heads.key_dim, heads.value_dim)
        self.conv = guarded(values.normal(STATES, width, heads.kernel - 1, dtype=dtype))
        self.state = guarded(values.normal(*shape, dtype=torch.float32))

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs and states of the reference, computed on a CPU."""
        conv, state = self.conv.cpu().clone(), self.state.cpu().clone()
        own = self.weights._replace(
            **{
                name: getattr(self.weights, name).cpu()
                for name in ("conv", "a_log", "bias", "norm")
            }
        )
        projected = Projected(*(part.cpu() for part in self.projected))
        return reference.delta_net(projected, own, conv, state, rows), conv, state

    def run(self, rows: StateRows) -> Tensor:
        weights = self.weights
        with (
            unchanged(**self.projected._asdict(), conv=weights.conv, norm=weights.norm),
            PoisonedAllocations(),
        ):
            return delta_net(
                self.projected, weights, self.conv, self.state, rows, reference.NORM_EPS
            )

    def part(self, first: int, last: int) -> None:
        """Leave these tokens alone."""
        self.projected = Projected(*(part[first:last] for part in self.projected))


def check(
    heads: Heads,
    counts: list[int],
    begin: list[int],
    end: list[int],
    saves: Saves | None = None,
    dtype: torch.dtype = DTYPE,
    padding: int = 0,
    drafts: dict[int, int] | None = None,
) -> None:
    layer = Layer(sum(counts) + padding, heads, dtype)
    rows = make_rows(counts, begin, end, saves, drafts=drafts)
    expected, convs, states = layer.expected(rows)
    out = layer.run(make_rows(counts, begin, end, saves, DEVICE, padding, drafts))
    tolerance = 2e-5 if dtype == torch.float32 else 20 * torch.finfo(dtype).eps
    tokens = slice(0, sum(counts))
    torch.testing.assert_close(
        out[tokens].float().cpu(), expected[tokens].float(), rtol=tolerance, atol=tolerance
    )
    assert same(layer.conv.cpu(), convs), "the convolution's state is a copy of inputs"
    torch.testing.assert_close(layer.state.cpu(), states, rtol=tolerance, atol=tolerance)
    if padding:
        assert_untouched(out[sum(counts) :], "outputs of padding")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [Heads(), Heads(2, 2, 16, 16), Heads(1, 3, 24, 20), Heads(2, 4, 8, 40), Heads(1, 1, 64, 64)],
    ids=str,
)
def test_rows_of_all_lengths(heads: Heads, dtype: torch.dtype) -> None:
    counts, begin, end = [1, 3, 70, 0, 8, 9], [0, -1, 1, 3, 9, -1], [0, 2, 4, 5, 6, 7]
    check(heads, counts, begin, end, dtype=dtype)


@pytest.mark.parametrize("count", [9, 63, 64, 65, 128, 130])
def test_chunks(count: int) -> None:
    check(Heads(), [count], [3], [3])
    check(Heads(), [count], [-1], [0])


def test_few_rows_or_long_rows_alone() -> None:
    check(Heads(), [1, 1, 5], [0, 1, 2], [0, 1, 2])
    check(Heads(), [20, 30], [0, 1], [0, 1])


def test_rows_may_begin_from_one_state_and_leave_none() -> None:
    check(Heads(), [2, 1, 20, 30], [4, 4, 4, 4], [0, -1, 1, -1])


def test_padding_is_left_alone() -> None:
    """A captured step has room for more rows and tokens than it uses."""
    check(Heads(), [1, 20, 0, 0], [0, 1, -1, -1], [0, 1, -1, -1], padding=3)


@pytest.mark.parametrize("begin", range(4))
def test_states_after_each_draft(begin: int) -> None:
    """A row begins from one of the state rows that it writes, whichever drafts were accepted."""
    saves = {2: [(1, 10), (4, 11)]}
    check(Heads(), [4, 1, 5], [begin, 4, 6], [0, 4, 5], saves, drafts={0: 3, 2: 1})
    check(Heads(), [8, 20], [7 - begin, -1], [0, 9], drafts={0: 7})
    check(Heads(), [3, 2], [0, 1], [-1, 4], drafts={0: 2, 1: 1})


def test_saves_after_any_token() -> None:
    saves = {0: [(1, 4), (2, 5), (3, 6)], 2: [(1, 7), (4, 8)]}
    check(Heads(), [4, 1, 5], [0, 1, 2], [0, 1, 2], saves)


@pytest.mark.parametrize(
    "offsets", [[1], [64], [63, 65], [16, 32, 48, 64], [64, 128, 129], [130], [70, 80]], ids=str
)
def test_states_within_a_prompt(offsets: list[int]) -> None:
    saves = {1: [(offset, 2 + i) for i, offset in enumerate(offsets)], 2: [(3, 10)]}
    check(Heads(), [1, 130, 4, 12], [0, 1, -1, 9], [0, 1, 11, 9], saves)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_other_sizes_of_the_convolution(kernel: int) -> None:
    saves = {0: [(1, 7)], 2: [(2, 8), (12, 9)]}
    check(Heads(kernel=kernel), [1, 3, 20], [0, 1, -1], [0, 1, 4], saves, drafts={1: 2})


def test_programs_that_share_a_state_are_counted_anew() -> None:
    """Check a second launch, whose counters the first one has left at zero."""
    for _ in range(2):
        check(Heads(2, 8), [1, 2, 1, 0], [0, 1, -1, -1], [0, 1, 2, -1])


def test_tokens_one_by_one_have_the_bits_of_a_row_with_drafts() -> None:
    layer, single = Layer(5, Heads()), Layer(5, Heads())
    out = layer.run(make_rows([5], [1], [1], device=DEVICE))
    every = single.projected
    for i in range(5):
        single.projected = Projected(*(part[i : i + 1] for part in every))
        assert same(single.run(make_rows([1], [1], [1], device=DEVICE)), out[i : i + 1])
    assert same(single.state, layer.state) and same(single.conv, layer.conv)


@pytest.mark.parametrize("count", [3, 70])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(count: int) -> None:
    layer, alone = Layer(80 + count, Heads()), Layer(80 + count, Heads())
    counts, states = [1, count, 79], [0, 1, 2]
    out = layer.run(make_rows(counts, states, states, device=DEVICE))
    alone.part(1, 1 + count)
    assert same(alone.run(make_rows([count], [1], [1], device=DEVICE)), out[1 : 1 + count])
    assert same(alone.state[1], layer.state[1])


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_qwen3_next(dtype: torch.dtype) -> None:
    saves = {1: [(64, 8), (512, 9)], 2: [(1, 10)]}
    check(Heads(16, 32, 128, 128), [1, 1000, 3, 200], [0, 1, 2, -1], [0, 1, 2, 3], saves, dtype)
