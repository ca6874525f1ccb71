"""The gated delta rule, its convolution and its norm against transformers, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from sidestep.kernels.ops.causal_conv import causal_conv
from sidestep.kernels.ops.gated_delta import Decay, gated_delta
from sidestep.kernels.ops.rms_norm import gated_rms_norm
from tests.recurrent.state_rows import make_rows


@dataclass(frozen=True)
class Heads:
    keys: int = 2
    values: int = 4
    key_dim: int = 16
    value_dim: int = 24

    @property
    def width(self) -> int:
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


HEADS = Heads()


class Layer:
    """Random inputs of some tokens, and the states of a few sequences."""

    def __init__(self, tokens: int, heads: Heads = HEADS, states: int = 6) -> None:
        torch.manual_seed(tokens)
        self.heads = heads
        self.qkv = torch.randn(tokens, heads.width)
        self.ba = torch.randn(tokens, 2 * heads.values)
        # Some heads forget within a few tokens, others remember hundreds.
        self.decay = Decay(torch.linspace(-6, 1, heads.values), torch.randn(heads.values))
        self.state = torch.randn(states, heads.values, heads.key_dim, heads.value_dim)

    def run(self, counts: list[int], *rows: list[int], first: int = 0, **more: object) -> Tensor:
        """Return the outputs of the tokens from `first` on. rows: state_in and state_out."""
        part = slice(first, first + sum(counts))
        steps = make_rows(counts, *rows, **more)  # type: ignore[arg-type]
        return gated_delta(self.qkv[part], self.ba[part], self.decay, self.state, steps)

    def expected(self, tokens: slice, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return transformers' outputs and state of a sequence of these tokens."""
        heads = self.heads
        sizes = [heads.keys * heads.key_dim] * 2 + [heads.values * heads.value_dim]
        q, k, v = self.qkv[None, tokens].split(sizes, -1)
        b, a = self.ba[None, tokens].chunk(2, -1)
        g = -self.decay.a_log.exp() * torch.nn.functional.softplus(a + self.decay.bias)
        count = tokens.stop - tokens.start
        rule = torch_recurrent_gated_delta_rule if count <= 8 else torch_chunk_gated_delta_rule
        out, after = rule(
            q.unflatten(-1, (heads.keys, -1)),
            k.unflatten(-1, (heads.keys, -1)),
            v.unflatten(-1, (heads.values, -1)),
            g,
            b.sigmoid(),
            initial_state=None if state is None else state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out[0].flatten(1), after[0]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "heads", [HEADS, Heads(1, 1, 8, 8), Heads(3, 3, 16, 8), Heads(1, 6, 8, 16)], ids=str
)
def test_ragged_rows_equal_those_of_transformers(heads: Heads) -> None:
    counts, begin, end = [1, 8, 9, 64, 65, 130, 3], [0, 1, -1, 2, 2, -1, 5], [0, 3, 1, -1, 4, 2, 5]
    layer = Layer(sum(counts), heads)
    before = layer.state.clone()
    out = layer.run(counts, begin, end)
    first = 0
    for count, source, target in zip(counts, begin, end, strict=True):
        tokens = slice(first, first + count)
        expected, after = layer.expected(tokens, None if source < 0 else before[source])
        close(out[tokens], expected)
        if target >= 0:
            close(layer.state[target], after)
        first += count


@pytest.mark.parametrize(
    "cuts", [[64], [1], [7, 8, 9], [63, 1, 1, 64], [100, 3], list(range(1, 15))]
)
def test_the_cuts_of_a_prompt_do_not_matter(cuts: list[int]) -> None:
    layer, whole = Layer(200), Layer(200)
    expected = whole.run([200], [-1], [0])
    pieces, first = [*cuts, 200 - sum(cuts)], 0
    for count in pieces:
        out = layer.run([count], [0 if first else -1], [0], first=first)
        close(out, expected[first : first + count])
        first += count
    close(layer.state[0], whole.state[0])


@pytest.mark.parametrize("count", [1, 5, 8, 9, 64, 129, 150])
def test_saves_are_the_states_of_shorter_rows(count: int) -> None:
    offsets = sorted({1, min(4, count), min(64, count), min(65, count), count - 1, count} - {0})
    layer, other = Layer(count, states=8), Layer(count, states=8)
    saves = [(offset, 2 + i) for i, offset in enumerate(offsets)]
    layer.run([count], [0], [1], saves={0: saves})
    for offset, row in [*saves, (count, 1)]:
        other.run([offset], [0], [7])
        close(layer.state[row], other.state[7])
    assert torch.equal(layer.state[0], Layer(count, states=8).state[0]), "wrote to another state"


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Let torch cut tensors, which it does by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


LARGE = Heads(4, 8, 128, 128)
"""Heads that torch shares out among its threads."""


@pytest.mark.usefixtures("three_threads")
def test_tokens_one_by_one_have_the_bits_of_a_row_with_drafts() -> None:
    """Accepted drafts must leave the state that steps without drafts leave."""
    layer, single = Layer(8, LARGE), Layer(8, LARGE)
    out = layer.run([8], [1], [1])
    for i in range(8):
        assert torch.equal(single.run([1], [1], [1], first=i), out[i : i + 1])
    assert torch.equal(single.state, layer.state)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("count", [1, 3, 70])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(count: int) -> None:
    counts = [5, count, 80, 1]
    layer, alone = Layer(sum(counts), LARGE), Layer(sum(counts), LARGE)
    out = layer.run(counts, [0, 1, 2, 3], [0, 1, 2, 3])
    assert torch.equal(alone.run([count], [1], [1], first=5), out[5 : 5 + count])
    assert torch.equal(alone.state[1], layer.state[1])


def test_repeated_tokens_keep_the_state_small() -> None:
    """With equal keys that nothing forgets, the powers of a chunk's matrix would be huge."""
    layer = Layer(200)
    layer.qkv[:] = layer.qkv[0]
    layer.ba[:] = torch.tensor([20.0] * 4 + [-20.0] * 4)
    expected, after = layer.expected(slice(0, 200), None)
    close(layer.run([200], [-1], [0]), expected)
    close(layer.state[0], after)


def test_bfloat16_rounds_only_the_outputs() -> None:
    layer, wide = Layer(90), Layer(90)
    layer.qkv, layer.ba = layer.qkv.bfloat16(), layer.ba.bfloat16()
    wide.qkv, wide.ba = layer.qkv.float(), layer.ba.float()
    out = layer.run([80, 10], [-1, 1], [0, 1])
    assert torch.equal(out, wide.run([80, 10], [-1, 1], [0, 1]).bfloat16())
    assert torch.equal(layer.state, wide.state)


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_the_convolution_has_the_same_bits_however_a_row_is_cut(kernel: int) -> None:
    torch.manual_seed(kernel)
    x, weight = torch.randn(40, 12), torch.randn(12, kernel)
    state = torch.randn(4, 12, kernel - 1)
    start = state.clone()
    rows = make_rows([30, 1, 9], [-1, 0, 1], [2, 0, 3])
    out = causal_conv(x, weight, state, rows)
    inputs = torch.cat([start[1], x[31:].T], 1)[None]
    plain = torch.nn.functional.conv1d(inputs, weight[:, None], groups=12)[0].T
    close(out[31:], torch.nn.functional.silu(plain))
    assert torch.equal(state[3], inputs[0, :, inputs.shape[2] - kernel + 1 :])
    again, first = start.clone(), 0
    for count in (1, 1, 5, 2, 21):
        part = make_rows([count], [2 if first else -1], [2])
        cut = causal_conv(x[first : first + count], weight, again, part)
        assert torch.equal(cut, out[first : first + count])
        first += count
    assert torch.equal(again[2], state[2])


def test_the_convolution_saves_states_within_a_row() -> None:
    torch.manual_seed(0)
    x, weight, state = torch.randn(6, 5), torch.randn(5, 4), torch.randn(6, 5, 3)
    before = torch.cat([state[0].T, x])
    causal_conv(x, weight, state, make_rows([6], [0], [0], {0: [(1, 1), (2, 2), (5, 3)]}))
    for offset, row in ((1, 1), (2, 2), (5, 3), (6, 0)):
        assert torch.equal(state[row], before[offset : offset + 3].T)


@pytest.mark.parametrize("begin", range(3))
def test_states_after_drafts_are_those_of_shorter_rows(begin: int) -> None:
    layer = Layer(6, states=7)
    x, weight, conv = torch.randn(6, 5), torch.randn(5, 4), torch.randn(7, 5, 3)
    start, before = layer.state.clone(), conv.clone()
    layer.run([4, 2], [begin, -1], [0, 3], drafts={0: 2, 1: 1})
    causal_conv(x, weight, conv, make_rows([4, 2], [begin, -1], [0, 3], drafts={0: 2, 1: 1}))
    after = layer.state
    for tokens, begun, at in (
        (slice(0, 2), begin, 0),
        (slice(0, 3), begin, 1),
        (slice(0, 4), begin, 2),
        (slice(4, 5), -1, 3),
        (slice(4, 6), -1, 4),
    ):
        layer.state, own = start.clone(), before.clone()
        count = tokens.stop - tokens.start
        layer.run([count], [begun], [6], first=tokens.start)
        causal_conv(x[tokens], weight, own, make_rows([count], [begun], [6]))
        assert torch.equal(after[at], layer.state[6])
        assert torch.equal(conv[at], own[6])


def test_the_gated_norm_equals_that_of_transformers() -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(7, 3 * 16), torch.randn(7, 100)[:, 10:58]
    norm = Qwen3NextRMSNormGated(16, 1e-6)
    norm.weight.data = torch.randn(16)
    with torch.no_grad():
        expected = norm(x.view(-1, 16), gate.reshape(-1, 16)).view(7, -1)
    close(gated_rms_norm(x, norm.weight.data, gate, 1e-6), expected)
    rows = gated_rms_norm(x[2:3], norm.weight.data, gate[2:3], 1e-6)
    assert torch.equal(rows, gated_rms_norm(x, norm.weight.data, gate, 1e-6)[2:3])
