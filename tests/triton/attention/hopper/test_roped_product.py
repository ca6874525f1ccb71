"""Projections that end as attention takes them, by the kernel for Hopper, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.hopper import roped_product
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.products.linear import unfinished_linear
from sidestep.kernels.unfinished_product import PendingProduct, finished
from tests.triton.attention.rotary import EPS, normed, rotary_tables, turned
from tests.triton.support import (
    DEVICE,
    PoisonedAllocations,
    Values,
    assert_close,
    assert_untouched,
    guarded,
    int32,
    needs_hopper,
    poisoned,
    unchanged,
)

HALVES = [torch.bfloat16, torch.float16]
POSITIONS = 50
"""Number of rows in the tables of cosines and sines."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    inputs: int
    page: int = 16
    normed: bool = False
    bias: bool = False

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


class Layer:
    """The operands of a layer with poisoned memory for its keys and values."""

    def __init__(self, shape: Shape, dtype: torch.dtype, padding: tuple[int, ...] = ()) -> None:
        values = Values(shape.width + shape.tokens + shape.inputs)
        self.shape = shape
        buffer = poisoned(shape.tokens, shape.inputs + 24, dtype=dtype)
        x = buffer[:, : shape.inputs].copy_(values.normal(shape.tokens, shape.inputs, dtype=dtype))
        scale = shape.inputs**-0.5
        weight = guarded(values.normal(shape.width, shape.inputs, dtype=dtype, scale=scale))
        bias = guarded(values.normal(shape.width, dtype=dtype))
        self.qkv = PendingProduct(x, weight, bias if shape.bias else None)
        weights = [guarded(values.normal(shape.dim, dtype=dtype)) for _ in range(2)]
        tables = rotary_tables(shape.dim, POSITIONS)
        self.rope = Rope(*tables, (weights[0], weights[1]) if shape.normed else None, EPS)
        blocks = -(-shape.tokens // shape.page) + 2
        self.cache = poisoned(blocks, 2 * shape.kv_heads, shape.page, shape.dim, dtype=dtype)
        self.slots = values.different(shape.tokens, blocks * shape.page)
        self.positions = values.integers(0, POSITIONS, shape.tokens)
        self.positions[0] = POSITIONS - 1
        for token in padding:
            self.slots[token], self.positions[token] = -1, 0
        self.given = {"x": buffer, "weight": weight, "bias": bias, "cos": tables[0]}

    def project(self) -> Tensor:
        return roped_product.project(
            self.qkv,
            int32(self.positions),
            int32(self.slots),
            self.rope,
            self.cache,
            self.shape.heads,
        )

    def written(self) -> Tensor:
        """Return keys and values of the tokens that are no padding, [N, 2 KVH, D]."""
        slots = torch.tensor([slot for slot in self.slots if slot >= 0], device=DEVICE)
        page = self.shape.page
        return self.cache[slots // page, :, slots % page]

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in float64, [T, heads, D]."""
        x, weight, bias = self.qkv
        product = x.double() @ weight.double().T
        if bias is not None:
            product += bias.double()
        heads = product.view(len(x), -1, self.shape.dim)
        counts = self.shape.heads, self.shape.kv_heads, self.shape.kv_heads
        query, key, value = heads.split(counts, 1)
        at = torch.tensor(self.positions, device=DEVICE)
        norms = self.rope.norms or (None, None)
        query, key = (
            turned(one if norm is None else normed(one, norm), self.rope.cos[at], self.rope.sin[at])
            for one, norm in zip((query, key), norms, strict=True)
        )
        return query, key, value


def check(shape: Shape, dtype: torch.dtype, padding: tuple[int, ...] = ()) -> None:
    layer = Layer(shape, dtype, padding)
    empty = layer.cache[0, :, 0].clone()
    assert roped_product.takes(layer.qkv, layer.rope, layer.cache)
    with unchanged(**layer.given), PoisonedAllocations():
        queries = layer.project()
    real = [token for token, slot in enumerate(layer.slots) if slot >= 0]
    query, key, value = layer.exact()
    assert_close(queries.view(shape.tokens, -1, shape.dim)[real], query[real], ulps=8)
    found = layer.written()
    assert_close(found[:, : shape.kv_heads], key[real], ulps=8)
    assert_close(found[:, shape.kv_heads :], value[real])
    assert torch.equal(queries[real], layer.project()[real])
    assert torch.equal(found, layer.written())
    slots = torch.tensor([layer.slots[token] for token in real], device=DEVICE)
    layer.cache[slots // shape.page, :, slots % shape.page] = empty
    assert_untouched(layer.cache, "slots of the cache that were not asked for")


@needs_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_head_sizes(dim: int, bias: bool, with_norms: bool, dtype: torch.dtype) -> None:
    check(Shape(4, 2, dim, 300, 200, normed=with_norms, bias=bias), dtype, padding=(3, 299))


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(1, 1, 128), (3, 1, 128), (7, 1, 64), (5, 5, 64), (2, 2, 128), (32, 4, 128), (14, 2, 64)],
)
@pytest.mark.parametrize("tokens", [1, 63, 129, 257, 700])
def test_heads_that_fill_tiles_and_that_do_not(
    heads: int, kv_heads: int, dim: int, tokens: int
) -> None:
    check(Shape(heads, kv_heads, dim, tokens, 72, normed=tokens % 2 == 0), torch.bfloat16)


@needs_hopper
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_block_sizes(page: int) -> None:
    check(Shape(8, 2, 128, 500, 256, page, normed=True), torch.bfloat16)


MODELS = [
    Shape(16, 8, 128, 2112, 1024, 64, normed=True),
    Shape(32, 8, 128, 1500, 4096, 64),
    Shape(64, 8, 64, 1200, 2880, 64, bias=True),
    Shape(32, 4, 128, 4500, 2048, 64, normed=True),
]


@needs_hopper
@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_shapes_of_models(shape: Shape) -> None:
    check(shape, torch.bfloat16, padding=(7, 8))


@needs_hopper
def test_it_agrees_with_separate_kernels() -> None:
    layer = Layer(MODELS[0], torch.bfloat16)
    queries, found = layer.project(), layer.written()
    product = finished(layer.qkv)
    places = int32(layer.positions), int32(layer.slots)
    qkv_rope(product, *places, layer.rope, layer.cache, layer.shape.heads)
    separate = product[:, : queries.shape[1]]
    # The sums have another order, so a few of them are rounded to the other neighbour.
    assert (queries == separate).float().mean() > 0.98
    assert (found == layer.written()).float().mean() > 0.98


@needs_hopper
def test_a_layer_that_reads_the_keys_of_another_one_has_queries_alone() -> None:
    layer = Layer(Shape(8, 0, 128, 600, 256), torch.bfloat16)
    layer.cache = poisoned(40, 4, 16, 128, dtype=torch.bfloat16)
    whole, layer.cache = layer.cache, layer.cache[:, :0]
    query, _, _ = layer.exact()
    assert_close(layer.project().view(600, -1, 128), query, ulps=8)
    assert_untouched(whole, "the keys of another layer")


@needs_hopper
def test_a_token_does_not_depend_on_those_beside_it() -> None:
    layer = Layer(Shape(8, 2, 128, 300, 512, normed=True), torch.bfloat16)
    alone, kept = layer.project(), layer.written()
    layer.qkv.x[200] = float("nan")
    beside, found = layer.project(), layer.written()
    others = torch.arange(300, device=DEVICE) != 200
    assert beside[200].isnan().all() and found[200].isnan().all()
    assert torch.equal(beside[others], alone[others]) and torch.equal(found[others], kept[others])


@needs_hopper
def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    layer = Layer(Shape(4, 8, 128, 130, 64), torch.bfloat16)
    layer.cache = torch.zeros(17_000, 16, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    layer.slots = [-1] * 129 + [17_000 * 64 - 2]
    layer.project()
    assert bool((layer.cache[-1, :, -2] != 0).any(-1).all())
    assert not layer.cache[:-1].any() and not layer.cache[-1, :, :-2].any()


def numbers(rows: int, columns: int) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")


@pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "left"),
    [
        (8448, 6144, 4096, True),
        (16384, 5120, 2048, True),
        (512, 6144, 4096, False),
        (300, 5120, 2048, False),
    ],
)
def test_products_of_many_rows_are_left_to_attention(
    rows: int, outputs: int, inputs: int, left: bool
) -> None:
    found = unfinished_linear(numbers(rows, inputs), numbers(outputs, inputs), None)
    assert isinstance(found, PendingProduct) == left


@pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")
@pytest.mark.usefixtures("h200")
def test_it_takes_plain_caches_and_norms_of_their_type() -> None:
    qkv = PendingProduct(numbers(8448, 4096), numbers(6144, 4096), None)
    cache = torch.empty(9, 16, 64, 128, dtype=torch.bfloat16, device="meta")
    table, norm = numbers(50, 64).float(), numbers(1, 128)[0]
    assert roped_product.takes(qkv, Rope(table, table, None, EPS), cache)
    assert roped_product.takes(qkv, Rope(table, table, (norm, norm), EPS), cache)
    assert not roped_product.takes(qkv, Rope(table, table, (norm.float(), norm), EPS), cache)
    assert not roped_product.takes(qkv, Rope(table, table, None, EPS), cache[..., :96])
    assert not roped_product.takes(qkv, Rope(table, table, None, EPS), cache.half())
