"""A step in halves: all rows go through all layers, one half attends while the other computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sidestep.executor.attention.base import Attends, AttentionSetup, AttentionShape, Norms
from sidestep.executor.attention.halves import Halves
from sidestep.executor.attention.triton_backend import TritonAttention
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.launch import free_processors, on_processors
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.processor_parts import ProcessorPart
from sidestep.kernels.unfinished_product import Product

CPU = torch.device("cpu")


class Rows:
    """The attention of some rows: it adds the number of the layer."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name, self._told = name, told

    def write(
        self, layer: int, qkv: Product, norms: Norms | None, kv_scales: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(qkv, Tensor)
        return qkv, torch.empty_like(qkv)

    def attend(self, layer: int, queries: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        self._told.append(f"{self._name} attends {layer}")
        out.copy_(queries + layer)


class Layer:
    """A layer that doubles the stream and adds what was attended."""

    def __init__(self, index: int, told: list[str]) -> None:
        self._index, self._told = index, told

    def attend(self, stream: Stream, attention: Attends) -> Tensor:
        return attention.attend(self._index, 3 * stream.hidden, None)

    def finish(self, stream: Stream, attended: Tensor) -> Stream:
        self._told.append(f"{self._index} on {free_processors(CPU)}")
        return Stream(stream.hidden.mul_(2).add_(attended), stream.norm)


def test_both_halves_go_through_all_layers_in_turn() -> None:
    told: list[str] = []
    layers = [Layer(i, told) for i in range(3)]
    parts = ProcessorPart(40, None), ProcessorPart(92, None)
    steps = [(range(3), Rows("first", told)), (range(3, 5), Rows("second", told))]
    hidden = torch.randn(5, 4)
    expected = hidden.clone()
    for i in range(3):
        expected = 2 * expected + (3 * expected + i)
    norm = RmsNorm(torch.ones(4), 1e-6)
    found = Halves(steps, parts).through(layers, Stream(hidden, norm))
    torch.testing.assert_close(found.hidden, expected)
    # A half's attention is launched before the other half's products of the same layer.
    assert told == [
        "first attends 0",
        "second attends 0",
        *("0 on 92", "first attends 1", "0 on 92", "second attends 1"),
        *("1 on 92", "first attends 2", "1 on 92", "second attends 2"),
        *("2 on 92", "2 on 92"),
    ]


def test_much_context_in_many_rows_pays() -> None:
    """Take sizes of Llama-3.1-8B, whose layers have 218 million weights, and variations of it."""
    kept: dict[str, Any] = {"num_layers": 2, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    usual = AttentionShape(**kept, windows=(0, 0))

    def context(rows: int, shape: AttentionShape = usual, **others: Any) -> range | None:
        setup: dict[str, Any] = {"num_blocks": 1, "block_size": 16, "rotary": [], "max_rows": 512}
        setup |= {"dtype": torch.bfloat16, "device": torch.device("meta"), "norm_eps": 1e-6}
        setup |= {"split_weights": 218_000_000, **others}
        with like_gpu(Gpu(90, 132), "meta"):
            return TritonAttention(AttentionSetup(shape=shape, **setup)).split_context(rows)

    few, many = context(256), context(512)
    assert few is not None and many is not None and context(128) is None
    assert 256 * 1024 in few and 256 * 768 not in few and 256 * 4096 not in few
    assert 512 * 1024 in many and 512 * 512 not in many
    assert context(256, split_weights=None) is None
    assert context(256, replace(usual, windows=(0, 1024))) is None
    assert context(256, replace(usual, softcaps=(None, 30.0))) is None
    coded = LayerKv(num_kv_heads=8, head_dim=128, format="fp8")
    assert context(256, replace(usual, kept=(coded, coded))) is None


def test_products_have_all_processors_elsewhere() -> None:
    whole = free_processors(CPU)
    with on_processors(92):
        assert free_processors(CPU) == 92
    assert free_processors(CPU) == whole
