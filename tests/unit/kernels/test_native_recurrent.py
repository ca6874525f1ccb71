"""The gated delta net by kernels in C: results and states as torch has them, and rows alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.native.library import NoLibraryError, load
from sidestep.kernels.native.recurrent import NativeDelta
from sidestep.kernels.ops.gated_delta import delta_net
from sidestep.kernels.recurrent.delta_parts import DeltaWeights, Projected
from sidestep.kernels.recurrent.state_rows import StateRows
from tests.recurrent.state_rows import make_rows

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 6, 20, 24, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
STATES = 24
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        load("recurrent.c")
    except NoLibraryError as error:
        pytest.skip(str(error))


class Net:
    """A gated delta net with random weights, and states of sequences that have begun."""

    def __init__(self, dtype: torch.dtype, key_heads: int = KEY_HEADS) -> None:
        torch.manual_seed(0)
        self.channels = 2 * key_heads * KEY_DIM + HEADS * VALUE_DIM
        self.weights = DeltaWeights(
            torch.randn(self.channels, TAPS).to(dtype),
            torch.rand(HEADS),
            torch.randn(HEADS),
            torch.rand(VALUE_DIM).to(dtype) + 0.5,
            1e-6,
        )
        native = NativeDelta.of(self.weights, KEY_DIM)
        assert native is not None
        self.native = native
        self.conv = torch.randn(STATES, self.channels, TAPS - 1).to(dtype)
        self.state = torch.randn(STATES, HEADS, KEY_DIM, VALUE_DIM)

    def inputs(self, tokens: int) -> Projected:
        """Return the parts of one projection, whose rows lie apart."""
        widths = [self.channels, HEADS * VALUE_DIM, 2 * HEADS]
        whole = torch.randn(tokens, sum(widths) + 3).to(self.weights.conv.dtype)
        return Projected(*whole[:, : sum(widths)].split(widths, 1))

    def run(
        self, inputs: Projected, rows: StateRows, *, native: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results, and the states behind the step."""
        conv, state = self.conv.clone(), self.state.clone()
        own = self.native if native else None
        return delta_net(inputs, self.weights, conv, state, rows, own), conv, state


def part(inputs: Projected, tokens: slice) -> Projected:
    return Projected(*(one[tokens] for one in inputs))


STEPS: dict[str, StateRows] = {
    "a token each": make_rows([1, 1, 1], [3, -1, 7], [4, 5, 7]),
    "few tokens": make_rows([3, 8, 1], [0, -1, 2], [0, 1, 9]),
    "few and many": make_rows([2, 70, 1, 9, 8], [0, 1, -1, -1, 4], [0, 1, 2, 3, 5]),
    "saves": make_rows([5, 1, 12], [0, 1, 2], [0, 1, 2], {0: [(1, 9), (5, 10)], 2: [(3, 11)]}),
    "several saves after a token": make_rows(
        [5, 19], [0, 1], [0, 1], {0: [(4, 8), (4, 9), (4, 10)], 1: [(19, 11), (19, 12), (19, 13)]}
    ),
    "a row without tokens": make_rows([1, 0, 2], [0, -1, 3], [0, -1, 3]),
    "no state for later": make_rows([2, 1], [0, 1], [-1, -1]),
    "two from one": make_rows([2, 1], [6, 6], [0, 1]),
    "drafts": make_rows([4, 3, 1], [1, 12, -1], [0, 10, 20], drafts={0: 2, 1: 2}),
    "drafts begin among their rows": make_rows([3], [2], [0], drafts={0: 2}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_results_and_states_are_those_of_torch(
    key_heads: int, step: str, dtype: torch.dtype
) -> None:
    net, rows = Net(dtype, key_heads), STEPS[step]
    inputs = net.inputs(int(rows.query_starts[-1]))
    made, expected = net.run(inputs, rows), net.run(inputs, rows, native=False)
    tolerance = max(2e-5, 2 * torch.finfo(dtype).eps)
    for own, other in zip(made, expected, strict=True):
        assert own.dtype == other.dtype
        scale = float(other.float().abs().mean())
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    net, threads = Net(dtype), torch.get_num_threads()
    counts, begins = [1, 8, 3, 30, 2], [3, 4, -1, 6, -1]
    inputs = net.inputs(sum(counts))
    together, conv, state = net.run(inputs, make_rows(counts, begins, [10, 11, 12, 13, 14]))
    try:
        first = 0
        for row, (count, begin) in enumerate(zip(counts, begins, strict=True)):
            torch.set_num_threads(1 + row % 3)
            tokens = slice(first, first + count)
            alone = net.run(part(inputs, tokens), make_rows([count], [begin], [0]))
            assert torch.equal(alone[0], together[tokens])
            assert torch.equal(alone[1][0], conv[10 + row])
            assert torch.equal(alone[2][0], state[10 + row])
            first += count
    finally:
        torch.set_num_threads(threads)


def test_other_states_stay_as_they_are() -> None:
    net = Net(torch.float32)
    _, conv, state = net.run(net.inputs(4), make_rows([3, 1], [5, 6], [5, 8], {0: [(2, 9)]}))
    written = torch.tensor([5, 8, 9])
    kept = torch.ones(STATES, dtype=torch.bool).index_fill_(0, written, False)
    assert torch.equal(conv[kept], net.conv[kept]) and torch.equal(state[kept], net.state[kept])
    assert not (state[written] == net.state[written]).any()


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    net = Net(torch.float32)
    inputs = net.inputs(3)
    inputs.qkv[1] = torch.nan
    out, conv, state = net.run(inputs, make_rows([1, 1, 1], [0, 1, 2], [0, 1, 2]))
    assert not out[1].isfinite().any() and not state[1].isfinite().any()
    for row in (0, 2):
        assert out[row].isfinite().all() and state[row].isfinite().all()
        assert conv[row].isfinite().all()


def test_what_kernels_do_not_take_is_left_to_torch() -> None:
    weights = Net(torch.float32).weights
    assert NativeDelta.of(weights, 257) is None
    assert NativeDelta.of(weights._replace(conv=torch.ones(8, 9)), KEY_DIM) is None
    assert NativeDelta.of(weights._replace(conv=weights.conv.half()), KEY_DIM) is None
