"""Norms of heads, rotary embedding and the write to the cache in one kernel, against float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.qkv_rope_triton import qkv_rope
from sidestep.kernels.unfinished_product import UnscaledProduct
from tests.triton.attention.rotary import EPS, normed, rotary_tables, turned
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    Values,
    assert_close,
    assert_margins_untouched,
    assert_untouched,
    guarded,
    int32,
    needs_gpu,
    poisoned,
    unchanged,
)

POSITIONS = 50
"""Number of rows in the tables of cosines and sines."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    page: int = 16
    tokens: int = 3
    normed: bool = False
    unscaled: bool = False
    """Whether rows and columns of the projections are still to be scaled."""


def check_written(shape: Shape, written: Tensor, key: Tensor, value: Tensor) -> None:
    """Check a token's keys and values in the cache, [2 KVH, D]."""
    assert_close(written[: shape.kv_heads], key, ulps=6)
    values = written[shape.kv_heads :]
    if shape.unscaled:
        assert_close(values, value)
    else:
        assert torch.equal(values, value.to(values.dtype)), "values are copied as they are"


def check(shape: Shape, dtype: torch.dtype, padding: tuple[int, ...] = (), apart: int = 0) -> None:
    """Check the kernel.

    padding: tokens that belong to no request. apart: number of elements between two rows of qkv.
    """
    values = Values(shape.heads * shape.dim + shape.page)
    width, blocks = (shape.heads + 2 * shape.kv_heads) * shape.dim, 5
    buffer = poisoned(shape.tokens, width + apart, dtype=dtype)
    qkv = buffer[:, :width].copy_(values.normal(shape.tokens, width, dtype=dtype))
    cache = poisoned(blocks, 2 * shape.kv_heads, shape.page, shape.dim, dtype=dtype)
    empty = cache[0, :, 0].clone()
    cos, sin = rotary_tables(shape.dim, POSITIONS)
    # The positions are the last one of the tables, and others.
    positions = [POSITIONS - 1, *values.integers(0, POSITIONS, shape.tokens - 1)]
    slot_mapping = values.different(shape.tokens, blocks * shape.page)
    slot_mapping[:2] = (
        [blocks * shape.page - 1, 0] if shape.tokens > 1 else [blocks * shape.page - 1]
    )
    slot_mapping = (
        slot_mapping if len(set(slot_mapping)) == shape.tokens else list(range(shape.tokens))
    )
    for token in padding:
        slot_mapping[token], positions[token] = -1, 0
    norms = (
        guarded(values.normal(shape.dim, dtype=dtype)),
        guarded(values.normal(shape.dim, dtype=dtype)),
    )
    rows = guarded(values.normal(shape.tokens, 1, dtype=torch.float32))
    columns = guarded(values.normal(1, width, dtype=torch.float32))
    exact = qkv.double() * (rows.double() * columns.double() if shape.unscaled else 1)
    given = exact.view(shape.tokens, -1, shape.dim)
    query, key, value = given.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    at = torch.tensor(positions, device=DEVICE)
    expected_query, expected_key = (
        turned(normed(x, weight) if shape.normed else x, cos[at], sin[at])
        for x, weight in zip((query, key), norms, strict=True)
    )

    with unchanged(
        cos=cos,
        sin=sin,
        q_weight=norms[0],
        k_weight=norms[1],
        between=buffer[:, width:],
        keys_values=qkv[:, shape.heads * shape.dim :],
        rows=rows,
        columns=columns,
    ):
        qkv_rope(
            UnscaledProduct(qkv, rows, columns) if shape.unscaled else qkv,
            int32(positions),
            int32(slot_mapping),
            Rope(cos, sin, norms if shape.normed else None, EPS),
            cache,
            shape.heads,
        )

    assert_margins_untouched(buffer, cache)
    real = [t for t in range(shape.tokens) if t not in padding]
    got = qkv[:, : shape.heads * shape.dim].view(shape.tokens, -1, shape.dim)
    assert_close(got[real], expected_query[real], ulps=6)
    for t in real:
        written = cache[slot_mapping[t] // shape.page, :, slot_mapping[t] % shape.page]
        check_written(shape, written, expected_key[t], value[t])
        written.copy_(empty)
    assert_untouched(cache, "slots of the cache that were not asked for")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_sizes(dim: int, with_norms: bool, dtype: torch.dtype) -> None:
    check(Shape(4, 2, dim, normed=with_norms), dtype)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dim", [80, 128])
def test_projections_that_are_still_to_be_scaled(dim: int, with_norms: bool) -> None:
    check(Shape(4, 2, dim, normed=with_norms, unscaled=True), DTYPE, padding=(2,), apart=8)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 3), (7, 1), (14, 2), (20, 1), (12, 4), (5, 5)]
)
def test_groups(heads: int, kv_heads: int, with_norms: bool) -> None:
    """Cover heads that fill programs evenly and that do not, one program a token and several."""
    check(Shape(heads, kv_heads, 80, tokens=2, normed=with_norms), DTYPE)


@pytest.mark.parametrize("page", [1, 16, 24, 32, 48, 64, 128])
def test_block_sizes(page: int) -> None:
    check(Shape(2, 1, 16, page, tokens=5), DTYPE)


@pytest.mark.parametrize("padding", [(0,), (4, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_padding_is_not_written_to_the_cache(padding: tuple[int, ...]) -> None:
    check(Shape(4, 2, 16, tokens=6, normed=True), DTYPE, padding)


def test_rows_of_qkv_may_lie_apart() -> None:
    check(Shape(4, 2, 64, tokens=4, normed=True), DTYPE, apart=24)


MODELS = [Shape(16, 8, 128, 64, 300, True), Shape(32, 8, 128, 64, 65), Shape(64, 8, 128, 16, 9)]


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_shapes_of_models(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, dtype, padding=(3, 8))


@needs_gpu
def test_a_cache_of_more_elements_than_31_bits_count() -> None:
    cache = torch.zeros(17_000, 16, 64, 128, dtype=torch.bfloat16, device=DEVICE)
    qkv = torch.ones(1, (16 + 16) * 128, dtype=torch.bfloat16, device=DEVICE)
    qkv_rope(
        qkv,
        int32([0]),
        int32([17_000 * 64 - 2]),
        Rope(*rotary_tables(128, POSITIONS), None, EPS),
        cache,
        16,
    )
    assert bool((cache[-1, :, -2] == 1).all())
    assert not cache[:-1].any() and not cache[-1, :, :-2].any() and not cache[-1, :, -1].any()
