"""Linear layers in each layout, rotary tables, and the division of work among ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sidestep.executor.attention.rotary import RotaryTable, frequencies, pair_order
from sidestep.executor.layers import cpu_product
from sidestep.executor.layers.layouts import plain_layouts
from sidestep.executor.layers.linear import Linear
from sidestep.executor.layers.vocab import VocabParallelHead, vocab_shard
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import DummyWeights
from sidestep.ipc.model.hf_config import HfConfig
from sidestep.ipc.model.layer_spec import RopeSpec
from sidestep.ipc.model.rope_config import read_rope
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(7, 5), (48, 331), (1024, 700), (60, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_is_the_plain_product(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, add = (
        (torch.randn(outputs, inputs) / inputs**0.5).to(dtype),
        torch.randn(outputs).to(dtype),
    )
    linear = Linear(weight, add if bias else None)
    for rows in (0, 1, 3, 8, 130):
        x = torch.randn(rows, inputs).to(dtype)
        expected = x.double() @ weight.double().T + (add.double() if bias else 0)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_the_private_operators_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_layouts, "_packing", lambda: None)
    monkeypatch.setattr(cpu_product, "_chosen", {})
    weight, x = torch.randn(1024, 700) / 700**0.5, torch.randn(3, 700)
    linear = Linear(weight)
    assert "packed" not in repr(linear)
    torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-4, atol=1e-5)


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
}
NO_LENGTH = {"original_max_position_embeddings": None}
YARNS = [
    {},
    {"beta_fast": 16, "beta_slow": 2},
    {"attention_factor": 1.5},
    {"mscale": 1.0, "mscale_all_dim": 0.5},
    {"mscale": 0.7},
    {"mscale": 0.7, "mscale_all_dim": 0},
    {"truncate": False},
    {"factor": 1.0},
    NO_LENGTH,
    {"factor": 32.0, "original_max_position_embeddings": 128, "beta_fast": 1, "beta_slow": 1},
]


@pytest.mark.parametrize(
    ("kind", "more"), [("linear", {}), ("llama3", {})] + [("yarn", y) for y in YARNS], ids=str
)
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "type"])
def test_scaled_frequencies_equal_those_of_transformers(
    kind: str, more: dict[str, Any], head_dim: int, form: str
) -> None:
    """Let both sides read config.json, in its newer form and in the two older ones."""
    scaling = {name: value for name, value in {**ROPES[kind], **more}.items() if value is not None}
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4 * head_dim,
        "head_dim": head_dim,
        "num_attention_heads": 4,
        "max_position_embeddings": 40960,
    }
    if form == "rope_parameters":
        values[form] = {"rope_theta": 50000.0, "rope_type": kind, **scaling}
    else:
        name = "type" if form == "type" else "rope_type"
        values |= {"rope_theta": 50000.0, "rope_scaling": {name: kind, **scaling}}
    expected, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**copy.deepcopy(values)), CPU)
    got, got_factor = frequencies(read_rope(HfConfig("", values)), head_dim)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert got_factor == pytest.approx(factor)


@pytest.mark.parametrize("length", [4096, 131072])
@pytest.mark.parametrize("rotated", [1.0, 0.75])
def test_longrope_equals_that_of_transformers_for_short_and_long_texts(
    rotated: float, length: int
) -> None:
    pairs = int(64 * rotated) // 2
    values: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "partial_rotary_factor": rotated,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / pairs for i in range(pairs)],
            "long_factor": [1.0 + 9 * i for i in range(pairs)],
        },
    }
    config = Phi3Config(**copy.deepcopy(values))
    expected, factor = ROPE_INIT_FUNCTIONS["longrope"](config, CPU, seq_len=length)
    got, got_factor = frequencies(read_rope(HfConfig("", values), rotated=1.0), 64, length)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    assert got_factor == pytest.approx(factor)


@pytest.mark.parametrize("rotated", [1.0, 0.25, 0.3])
def test_a_proportional_rope_equals_that_of_transformers(rotated: float) -> None:
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": rotated}
    ropes = {"full_attention": {**full, "factor": 2.0}, "sliding_attention": full}
    fields: dict[str, Any] = {"global_head_dim": 48, "rope_parameters": copy.deepcopy(ropes)}
    config = Gemma4TextConfig(**fields)
    kind = "full_attention"
    expected, _ = ROPE_INIT_FUNCTIONS["proportional"](config, CPU, layer_type=kind)
    values = {**config.to_dict(), "architectures": ["Gemma4ForCausalLM"]}
    rope = read_rope(HfConfig("", values), layer_type=kind)
    got, factor = frequencies(rope, 48)
    assert factor == 1
    torch.testing.assert_close(got, expected[: len(got)], rtol=1e-6, atol=0)
    assert not expected[len(got) :].any()
    table = RotaryTable(rope, 48, 5, CPU)
    torch.testing.assert_close(table.cos[4], (4 * expected).cos())
    torch.testing.assert_close(table.sin[4], (4 * expected).sin())


@pytest.mark.parametrize("dims", [None, 16, 24])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_order_of_pairs_keeps_the_products_of_queries_and_keys(
    dims: int | None, interleaved: bool
) -> None:
    """Rotating pairs where they lie equals rotating reordered values by the tables."""
    rope = RopeSpec(theta=100.0, dims=dims, interleaved=interleaved)
    order, rotated = pair_order(rope, 32), dims or 32
    table = RotaryTable(rope, 32, 9, CPU)
    inverse, _ = frequencies(rope, 32)
    torch.manual_seed(0)
    q, k = torch.randn(2, 32, dtype=torch.float64)

    def turned(x: torch.Tensor, position: int) -> torch.Tensor:
        """Return x [D] with its pairs turned where they lie, as complex numbers."""
        part = x[:rotated]
        pairs = part.view(-1, 2) if interleaved else part.view(2, -1).T
        spun = torch.view_as_complex(pairs.contiguous()) * torch.exp(
            1j * inverse.double() * position
        )
        flat = torch.view_as_real(spun)
        return torch.cat([flat.reshape(-1) if interleaved else flat.T.reshape(-1), x[rotated:]])

    def by_table(x: torch.Tensor, position: int) -> torch.Tensor:
        first, second = (x if order is None else x[order]).view(2, 16)
        cos, sin = table.cos[position].double(), table.sin[position].double()
        return torch.cat([first * cos - second * sin, second * cos + first * sin])

    for at, other in ((0, 0), (3, 1), (8, 2)):
        expected = turned(q, at) @ turned(k, other)
        torch.testing.assert_close(
            by_table(q, at) @ by_table(k, other), expected, rtol=1e-5, atol=1e-5
        )


def rank(number: int, size: int) -> Parallel:
    """Return a rank's arithmetic without its group."""
    parallel = Parallel()
    parallel.rank, parallel.size = number, size
    return parallel


@pytest.mark.parametrize(
    ("total", "size", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 3, [[0], [0], [0]]),
    ],
)
def test_kv_heads_are_shared_or_repeated(total: int, size: int, expected: list[list[int]]) -> None:
    assert [list(rank(i, size).kv_heads(total)) for i in range(size)] == expected


@pytest.mark.parametrize(("vocab", "size"), [(10, 1), (10, 2), (11, 2), (10, 4), (3, 4), (9, 8)])
def test_vocabulary_shards_are_alike_and_hold_all_rows_once(vocab: int, size: int) -> None:
    weights = DummyWeights(0, torch.float32, CPU)
    whole = weights.get("embed.weight", (vocab, 6))
    shards = [vocab_shard(weights, "embed", vocab, 6, rank(i, size)) for i in range(size)]
    assert len({s.shape for s in shards}) == 1
    together = torch.cat(shards)
    assert torch.equal(together[:vocab], whole)
    assert not together[vocab:].any()


def test_the_head_cuts_the_padding_off() -> None:
    head = VocabParallelHead(torch.randn(12, 8), 11, Parallel())
    assert head(Stream(torch.randn(2, 8), RmsNorm(torch.ones(8), 1e-6))).shape == (2, 11)
