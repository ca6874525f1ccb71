"""Attention with a gate for each head, as in Qwen3-Next, against that of transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextRotaryEmbedding,
)

from sidestep.executor.attention.base import AttentionSetup, AttentionShape, StepBatch
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.attention.torch_backend import TorchAttention
from sidestep.executor.layers.attention import Attention
from sidestep.executor.parallel.parallel_state import LoneRank, Parallel
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.ipc.model.layer_spec import AttentionSpec, NormSpec, RopeSpec
from sidestep.kernels.ops.rms_norm import NoNorm, Stream
from tests.counting_weights import CountingWeights
from tests.unit.executor.recurrent.given_weights import GivenWeights
from tests.unit.executor.steps import Request, make_step

CPU = torch.device("cpu")
HIDDEN, TOKENS = 48, 40
NORM = NormSpec(eps=1e-6, offset=1.0)
ROPE = RopeSpec(theta=10000.0, dims=4)


def spec(bias: bool = False) -> AttentionSpec:
    return AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=ROPE,
        bias=bias,
        output_bias=bias,
        head_norms=True,
        gate=True,
    )


def theirs(bias: bool) -> tuple[Qwen3NextAttention, Tensor, Tensor]:
    """Return a layer of transformers, its inputs and its result."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=bias,
    )
    config._attn_implementation = "eager"
    layer = Qwen3NextAttention(config, 0).requires_grad_(False)
    for weight in layer.parameters():
        weight.data = torch.randn(weight.shape) * 0.3
    x = torch.randn(1, TOKENS, HIDDEN)
    turned = Qwen3NextRotaryEmbedding(config)(x, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    return layer, x[0], layer(x, turned, mask)[0][0]


def run(layer: Attention, x: Tensor, ranks: int, counts: list[int]) -> Tensor:
    """Return what the layer adds for one sequence, computed in chunks."""
    shape = AttentionShape(
        num_layers=1, num_heads=4 // ranks, num_kv_heads=2 // ranks, head_dim=16, windows=(0,)
    )
    setup = AttentionSetup(
        shape=shape,
        num_blocks=4,
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        rotary=[RotaryTable(ROPE, 16, TOKENS, CPU)],
        norm_eps=NORM.eps,
        max_rows=1,
    )
    backend, tables, made, first = TorchAttention(setup), HostTables(1, 64, 16), [], 0
    for count in counts:
        entering = {} if first else {0: Request([1] * count, 1)}
        step = make_step([(0, count, [] if first else [2, 0, 3, 1])], entering)
        tables.apply(step)
        batch = make_batch(tables, step, 16)
        backend.begin_step(
            StepBatch(
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                host=batch,
                rows=None,
            )
        )
        stream = Stream(x[first : first + count].clone(), NoNorm(torch.ones(HIDDEN), 0.0))
        made.append(layer(stream, 0, backend, None).hidden)
        first += count
    return torch.cat(made)


def ours(layer: Qwen3NextAttention, bias: bool, parallel: Parallel) -> Attention:
    weights = GivenWeights(layer.state_dict(), "attn.")
    norm = NoNorm(torch.ones(HIDDEN), 0.0)
    return Attention(spec(bias), HIDDEN, weights, "attn", norm, parallel, norm_spec=NORM)


@pytest.mark.parametrize("counts", [[40], [7, 1, 1, 20, 11]], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_the_whole_sequence_of_transformers(bias: bool, counts: list[int]) -> None:
    layer, x, expected = theirs(bias)
    made = run(ours(layer, bias, Parallel()), x, 1, counts) - x
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_the_parts_of_two_ranks_sum_to_the_whole() -> None:
    layer, x, expected = theirs(True)
    made = [run(ours(layer, True, LoneRank(rank, 2)), x, 2, [40]) for rank in range(2)]
    # Rank 0 adds the stream.
    torch.testing.assert_close(made[0] + made[1] - x, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_specification_states_what_a_rank_reads(ranks: int) -> None:
    weights, norm = CountingWeights(), NoNorm(torch.ones(HIDDEN), 0.0)
    Attention(spec(), HIDDEN, weights, "attn", norm, LoneRank(0, ranks), norm_spec=NORM)
    assert weights.count == spec().size(HIDDEN, ranks).parameters
