"""The gated delta rule in Triton against torch, with ragged rows, shared states and saves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops import gated_delta as reference
from sidestep.kernels.recurrent.gated_delta_triton import gated_delta
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


class Layer:
    """The inputs of some tokens, and the states of a few sequences."""

    def __init__(self, tokens: int, heads: Heads, dtype: torch.dtype = DTYPE) -> None:
        values = Values(tokens + heads.values)
        width = 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim
        # The rows of both lie apart, as parts of a larger product do.
        self.qkv = poisoned(tokens, width + 8, dtype=dtype)[:, :width]
        self.qkv.copy_(values.normal(tokens, width, dtype=dtype))
        self.ba = poisoned(tokens, 2 * heads.values + 3, dtype=dtype)[:, 3:]
        self.ba.copy_(values.normal(tokens, 2 * heads.values, dtype=dtype, scale=2))
        self.decay = reference.Decay(
            torch.linspace(-6, 1, heads.values, device=DEVICE),
            values.normal(heads.values, dtype=torch.float32),
        )
        shape = (STATES, heads.values, heads.key_dim, heads.value_dim)
        self.state = guarded(values.normal(*shape, dtype=torch.float32))

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the outputs and states of the reference, computed on a CPU."""
        state = self.state.cpu().clone()
        decay = reference.Decay(self.decay.a_log.cpu(), self.decay.bias.cpu())
        qkv, ba = self.qkv.cpu().float(), self.ba.cpu().float()
        return reference.gated_delta(qkv, ba, decay, state, rows), state

    def run(self, rows: StateRows) -> Tensor:
        with (
            unchanged(qkv=self.qkv, ba=self.ba, a_log=self.decay.a_log, bias=self.decay.bias),
            PoisonedAllocations(),
        ):
            weights = self.decay.a_log, self.decay.bias
            return gated_delta(self.qkv, self.ba, *weights, self.state, rows, reference.NORM_EPS)


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
    expected, states = layer.expected(make_rows(counts, begin, end, saves, drafts=drafts))
    out = layer.run(make_rows(counts, begin, end, saves, DEVICE, padding, drafts))
    tolerance = 1e-5 if dtype == torch.float32 else 10 * torch.finfo(dtype).eps
    tokens = slice(0, sum(counts))
    torch.testing.assert_close(
        out[tokens].float().cpu(), expected[tokens], rtol=tolerance, atol=tolerance
    )
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


def test_equal_keys_that_nothing_forgets() -> None:
    layer = Layer(100, Heads(), torch.float32)
    layer.qkv[:] = layer.qkv[0].clone()
    layer.ba[:] = torch.tensor([20.0, 20.0, -20.0, -20.0])
    rows = make_rows([100], [-1], [0])
    expected, states = layer.expected(rows)
    out = layer.run(make_rows([100], [-1], [0], device=DEVICE))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.state.cpu(), states, rtol=1e-5, atol=1e-5)


def test_tokens_one_by_one_have_the_bits_of_a_row_with_drafts() -> None:
    layer, single = Layer(5, Heads()), Layer(5, Heads())
    out = layer.run(make_rows([5], [1], [1], device=DEVICE))
    qkv, ba = single.qkv, single.ba
    for i in range(5):
        single.qkv, single.ba = qkv[i : i + 1], ba[i : i + 1]
        assert same(single.run(make_rows([1], [1], [1], device=DEVICE)), out[i : i + 1])
    assert same(single.state, layer.state)


@pytest.mark.parametrize("count", [3, 70])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(count: int) -> None:
    layer, alone = Layer(80 + count, Heads()), Layer(80 + count, Heads())
    counts, states = [1, count, 79], [0, 1, 2]
    out = layer.run(make_rows(counts, states, states, device=DEVICE))
    alone.qkv, alone.ba = alone.qkv[1 : 1 + count], alone.ba[1 : 1 + count]
    assert same(alone.run(make_rows([count], [1], [1], device=DEVICE)), out[1 : 1 + count])
    assert same(alone.state[1], layer.state[1])


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_qwen3_next(dtype: torch.dtype) -> None:
    saves = {1: [(64, 8), (512, 9)], 2: [(1, 10)]}
    check(Heads(16, 32, 128, 128), [1, 1000, 3, 200], [0, 1, 2, -1], [0, 1, 2, 3], saves, dtype)
