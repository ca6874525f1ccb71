"""The gated delta net's layer against that of transformers: in pieces, among rows, over ranks."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from sidestep.executor.layers.gated_delta import DeltaState, GatedDeltaNet, new_delta_state
from sidestep.executor.parallel.parallel_state import LoneRank, Parallel
from sidestep.executor.quantization.encode import encode
from sidestep.executor.weights.grouped_heads import GroupedHeads
from sidestep.executor.weights.weight_loader import Matrix, Weights
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.ipc.model.recurrent_spec import DeltaSpec
from sidestep.kernels.ops.rms_norm import NoNorm, Stream
from tests.counting_weights import CountingWeights
from tests.recurrent.state_rows import make_rows
from tests.unit.executor.recurrent.given_weights import GivenWeights

CPU = torch.device("cpu")
HIDDEN, EPS, NAME = 40, 1e-6, "linear_attn"
SPEC = DeltaSpec(num_key_heads=2, num_value_heads=6, key_dim=16, value_dim=12, conv_kernel=4)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention"],
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
}
KINDS: dict[str, Any] = {
    "qwen3_next": lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES), 0),
    "qwen3_5": lambda: Qwen3_5GatedDeltaNet(cast(Any, Qwen3_5TextConfig(**SIZES)), 0),
}


def theirs(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layer: torch.nn.Module = KINDS[kind]()
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape) * (0.3 if weight.dim() > 1 else 1.0)
    return layer.requires_grad_(False)


def ours(layer: torch.nn.Module, parallel: Parallel | None = None) -> GatedDeltaNet:
    weights: Weights = GivenWeights(layer.state_dict(), f"{NAME}.")
    if "in_proj_ba.weight" in layer.state_dict():
        weights = GroupedHeads(weights, SPEC)
    norm = NoNorm(torch.ones(HIDDEN), 0.0)
    return GatedDeltaNet(SPEC, HIDDEN, weights, NAME, norm, parallel or Parallel(), norm_eps=EPS)


def run(
    layer: GatedDeltaNet,
    x: Tensor,
    state: DeltaState,
    counts: list[int],
    begin: list[int],
    end: list[int],
) -> Tensor:
    """Return what the layer adds. counts: tokens of the rows. begin, end: their states."""
    stream = Stream(x.clone(), NoNorm(torch.ones(HIDDEN), 0.0))
    return layer(stream, state, make_rows(counts, begin, end)).hidden - x


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare against the largest value: smaller ones are sums of values of its size."""
    size = expected.abs().max()
    torch.testing.assert_close(actual / size, expected / size, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_in_pieces_equal_whole_sequences_of_transformers(kind: str) -> None:
    reference = theirs(kind)
    layer, lengths = ours(reference), [90, 7, 70]
    sequences = [torch.randn(length, HIDDEN) for length in lengths]
    state = new_delta_state(SPEC, 4, Parallel(), torch.float32, CPU)
    results: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    for counts in ([64, 3, 1], [1, 1, 68], [20, 3, 1], [5, 0, 0]):
        begin = [row if first else -1 for row, first in enumerate(done)]
        parts = [x[n : n + c] for x, n, c in zip(sequences, done, counts, strict=True)]
        made = run(layer, torch.cat(parts), state, counts, begin, [0, 1, 2])
        for row, part in enumerate(made.split(counts)):
            results[row].append(part)
        done = [n + c for n, c in zip(done, counts, strict=True)]
    assert done == lengths
    for parts, sequence in zip(results, sequences, strict=True):
        close(torch.cat(parts), reference(sequence[None])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_two_ranks_sum_to_the_whole(kind: str) -> None:
    reference, x = theirs(kind), torch.randn(30, HIDDEN)
    whole, rows = new_delta_state(SPEC, 3, Parallel(), torch.float32, CPU), ([1, 29], [-1, -1])
    expected = run(ours(reference), x, whole, *rows, [0, 1])
    total, heads = torch.zeros_like(x), []
    for rank in range(2):
        parallel = LoneRank(rank, 2)
        state = new_delta_state(SPEC, 3, parallel, torch.float32, CPU)
        stream = Stream(x.clone(), NoNorm(torch.ones(HIDDEN), 0.0))
        made = ours(reference, parallel)(stream, state, make_rows(*rows, [0, 1])).hidden
        # Rank 0 adds the stream.
        total += made - x if rank == 0 else made
        heads.append(state.delta)
    close(total, expected)
    close(torch.cat(heads, 1), whole.delta)


class CodedWeights(GivenWeights):
    """The same with all matrices in codes, but for the inputs of the decay."""

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Matrix:
        """Return the codes of the matrix; its part where no more is asked for."""
        own = self.get(f"{name}.weight", shape, rows, columns)
        return own if name.endswith("in_proj_ba") else encode(own, WeightScheme(kind="int8"))


def test_inputs_of_the_decay_may_be_in_another_form() -> None:
    """Checkpoints in FP8 leave in_proj_ba as it was, since its parts are smaller than blocks."""
    reference, x, norm = theirs("qwen3_next"), torch.randn(9, HIDDEN), NoNorm(torch.ones(HIDDEN), 0)
    weights = CodedWeights(reference.state_dict(), f"{NAME}.")
    layer = GatedDeltaNet(
        SPEC, HIDDEN, GroupedHeads(weights, SPEC), NAME, norm, Parallel(), norm_eps=EPS
    )
    for name in ("in_proj_qkvz", "out_proj"):
        own = cast(Any, getattr(reference, name)).weight
        own.data = encode(own.data, WeightScheme(kind="int8")).decoded()
    state = new_delta_state(SPEC, 1, Parallel(), torch.float32, CPU)
    made = run(layer, x, state, [9], [-1], [0])
    size = made.abs().max()
    torch.testing.assert_close(made / size, reference(x[None])[0] / size, rtol=1e-3, atol=1e-3)


def test_only_the_wanted_tokens_go_on() -> None:
    layer, x = ours(theirs("qwen3_5")), torch.randn(12, HIDDEN)
    state, same = (new_delta_state(SPEC, 2, Parallel(), torch.float32, CPU) for _ in range(2))
    norm, wanted = NoNorm(torch.ones(HIDDEN), 0.0), torch.tensor([1, 11])
    expected = run(layer, x, state, [2, 10], [-1, -1], [0, 1])[wanted]
    rows = make_rows([2, 10], [-1, -1], [0, 1])
    some = layer(Stream(x.clone(), norm), same, rows, wanted).hidden
    close(some - x[wanted], expected)
    assert torch.equal(same.delta, state.delta)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_specification_states_what_a_rank_reads_and_keeps(ranks: int, grouped: bool) -> None:
    parallel, weights = LoneRank(0, ranks), CountingWeights()
    source = GroupedHeads(weights, SPEC) if grouped else weights
    norm = NoNorm(torch.ones(HIDDEN), 0.0)
    GatedDeltaNet(SPEC, HIDDEN, source, NAME, norm, parallel, norm_eps=EPS)
    assert weights.count == SPEC.size(HIDDEN, ranks).parameters
    state = new_delta_state(SPEC, 5, parallel, torch.bfloat16, CPU)
    assert sum(one.nbytes for one in state) == 5 * SPEC.state_bytes(2, ranks)
    assert sum(one.numel() for one in state) == 5 * SPEC.size(HIDDEN, ranks).state
    assert all(one.fits(ranks) for one in SPEC.divided)
