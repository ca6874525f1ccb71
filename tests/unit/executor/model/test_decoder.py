"""The order of norms and products in the model.

Products may do parts of a norm, and the residual stream must still go through the right one.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from sidestep.executor.layers.linear import Linear
from sidestep.executor.models.decoder import DecoderForCausalLM, weights_elsewhere
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import DummyWeights
from sidestep.ipc.model.layer_spec import Activation, attention_of
from sidestep.ipc.model.layer_split import stage_of
from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.ops.silu_mul import GateAndUp, silu_mul
from tests.fakes import make_spec

SMALL = make_spec(3)
WIDTH = attention_of(SMALL.layers)[0].num_heads * attention_of(SMALL.layers)[0].head_dim


class DifferentNorms(DummyWeights):
    """Weights of which no two norms are equal; every layer counts."""

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        return (
            super().get(f"{name}_" if name.endswith("norm.weight") else name, shape, rows, columns)
            * 20
        )


class NoAttention:
    """A stand-in for an attention backend: it returns each token's queries."""

    def attend(self, layer: int, qkv: Tensor, *_: object) -> Tensor:
        return qkv[:, :WIDTH]


def logits(model: DecoderForCausalLM, rows: Tensor | None) -> Tensor:
    attention: Any = NoAttention()
    return model(torch.arange(5), attention, rows)


def begin_norms(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let linear layers share out norms as on a GPU.

    Return a list that grows by the inputs of the layers that finish a norm.
    """
    plain_call, plain_add, begun = Linear.__call__, Linear.add_to, []

    def call(self: Linear, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        if isinstance(x, Stream) and isinstance(x.begun, BegunNorm):
            begun.append(x.begun.weighted)
            scale = (x.begun.squares.sum(1, keepdim=True) / x.hidden.shape[1] + x.norm.eps).rsqrt()
            return plain_call(self, x.begun.weighted) * scale
        return plain_call(self, x)

    def add_to(
        self: Linear, residual: Tensor, x: Tensor, norm: RmsNorm | None = None
    ) -> BegunNorm | None:
        plain_add(self, residual, x)
        parts = residual.square().unflatten(1, (2, -1)).sum(2)
        return None if norm is None else BegunNorm(residual * norm.weight, parts)

    def inner(self: Linear, x: Tensor | Stream, activation: Activation = "silu") -> Tensor:
        assert activation == "silu"
        return silu_mul(self(x))

    monkeypatch.setattr(Linear, "__call__", call)
    monkeypatch.setattr(Linear, "unfinished", call)
    monkeypatch.setattr(Linear, "inner", inner)
    monkeypatch.setattr(Linear, "add_to", add_to)
    return begun


class Asked(DifferentNorms):
    """Weights that record the requested names."""

    def __init__(self) -> None:
        super().__init__(0, torch.float32, torch.device("cpu"))
        self.names: list[str] = []

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        self.names.append(name)
        return super().get(name, shape, rows, columns)


@pytest.mark.parametrize("shared", [False, True], ids=["", "norms shared out"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layers", [(1, 2), (2, 1), (1, 1, 1)])
def test_stages_one_after_the_other_are_the_model(
    layers: tuple[int, ...], tied: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = msgspec.structs.replace(SMALL, tie_word_embeddings=tied)
    whole, rows = Asked(), torch.tensor([1, 4])
    expected = logits(DecoderForCausalLM(spec, whole, Parallel()), rows)
    begun = begin_norms(monkeypatch) if shared else []
    stream, seen = torch.arange(5), list[str]()
    for index in range(len(layers)):
        stage, weights = stage_of(layers, index), Asked()
        model = DecoderForCausalLM(spec, weights, Parallel(), stage)
        seen += weights.names
        others = tuple(weights_elsewhere(spec, stage))
        assert not [
            name
            for name in weights.names
            if name.startswith(others) and not (tied and stage.is_last and "embed" in name)
        ]
        attention: Any = NoAttention()
        out = model.states(stream, attention, rows if stage.is_last else None)
        stream = model.logits(out) if stage.is_last else out.hidden
    torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-5)
    assert not shared or begun
    twice = ["model.embed_tokens.weight"] if tied else []
    assert sorted(seen) == sorted(whole.names + twice), (
        "each weight is one stage's, but for tied embeddings"
    )


@pytest.mark.parametrize("rows", [None, torch.tensor([1, 4])], ids=["all rows", "some rows"])
def test_a_norm_begun_by_one_product_is_that_of_the_next(
    rows: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DecoderForCausalLM(
        SMALL, DifferentNorms(0, torch.float32, torch.device("cpu")), Parallel()
    )
    expected = logits(model, rows)
    begun = begin_norms(monkeypatch)
    torch.testing.assert_close(logits(model, rows), expected, rtol=1e-4, atol=1e-5)
    assert len(begun) == 2 * SMALL.num_layers, "all but the first"


def test_the_last_layer_goes_on_with_those_tokens_alone_whose_logits_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = DecoderForCausalLM(
        SMALL, DifferentNorms(0, torch.float32, torch.device("cpu")), Parallel()
    )
    plain, counts = Linear.inner, list[int]()

    def inner(self: Linear, x: Stream, activation: Activation) -> Tensor | GateAndUp:
        counts.append(len(x.hidden))
        return plain(self, x, activation)

    monkeypatch.setattr(Linear, "inner", inner)
    every = logits(model, None)
    torch.testing.assert_close(
        logits(model, torch.tensor([1, 4])), every[[1, 4]], rtol=1e-4, atol=1e-5
    )
    assert counts == [5] * SMALL.num_layers + [5] * (SMALL.num_layers - 1) + [2]


def test_with_several_ranks_no_product_begins_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = Parallel()
    model = DecoderForCausalLM(
        SMALL, DifferentNorms(0, torch.float32, torch.device("cpu")), parallel
    )
    expected = logits(model, None)
    begun = begin_norms(monkeypatch)
    # This is rank 0 of two, and the other's part is zero: its own part is not the stream yet.
    parallel.size = 2
    monkeypatch.setattr(parallel, "all_reduce", lambda x: x)
    monkeypatch.setattr(
        "sidestep.executor.layers.vocab.VocabParallelEmbedding.__call__",
        lambda self, ids, norm: Stream(torch.nn.functional.embedding(ids, self._shard), norm),
    )
    torch.testing.assert_close(logits(model, None), expected)
    assert not begun
