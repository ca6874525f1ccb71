"""Operations between the QKV projection and attention, in one kernel or as parts of another.

They are the norm of each head's query and key (where a model has it), the rotary embedding, and the
write of keys and values into the paged cache. Decode attention can begin with them. The references
are kernels/ops/rms_norm.py and kernels/ops/rotary.py, and kernels/ops/kv_quantization.py for codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.attention.common.kv_codes_triton import CodedCache, parts_of, store_coded
from sidestep.kernels.attention.common.rope import Rope
from sidestep.kernels.attention.common.scores_triton import bounded
from sidestep.kernels.launch import cdiv, next_power_of_2, pdl
from sidestep.kernels.launch_order import opens_early, reads_early
from sidestep.kernels.unfinished_product import UnscaledProduct


@triton.jit
def turned(
    source, weight, dims, position, cos, sin, eps, inside, D: tl.constexpr, NORM: tl.constexpr
):
    """Return the heads at `source` [N, 1], normalised and rotated: [N, DIM], 0 outside.

    They have the type of `source`. It rounds as `_qkv_rope` does.
    """
    dtype = source.dtype.element_ty
    # Each dimension needs its partner, half a head away.
    other = tl.where(dims < D // 2, dims + D // 2, dims - D // 2)
    angle = tl.minimum(dims, other)
    there = dims < D
    c = tl.load(cos + position * (D // 2) + angle, mask=there, other=0.0)
    s = tl.load(sin + position * (D // 2) + angle, mask=there, other=0.0)
    s = tl.where(dims < D // 2, -s, s)
    x = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + other, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        w = tl.load(weight + dims, mask=there, other=0.0).to(tl.float32)
        v = tl.load(weight + other, mask=there, other=0.0).to(tl.float32)
        x = ((x * norm).to(dtype).to(tl.float32) * w).to(dtype).to(tl.float32)
        y = ((y * norm).to(dtype).to(tl.float32) * v).to(dtype).to(tl.float32)
    return (x * c + y * s).to(dtype)


@triton.jit
def begin_with_new(
    source,
    query,
    k_weight,
    cos,
    sin,
    eps,
    scale,
    cache,
    table,
    block_stride,
    head,
    position,
    owner,
    KVH: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    NORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Return the softmax's state after the token at `position` alone, if this program is the owner.

    The owner is the program that has the end of the row. It also writes the token's key and value
    to the cache. For other programs the state is that before any token. source: the token's key of
    this head; its value lies KVH heads further.
    """
    dims = tl.arange(0, DIM)[None, :]
    there = dims < D
    key = turned(
        source + tl.zeros([1, 1], tl.int32), k_weight, dims, position, cos, sin, eps, there, D, NORM
    )
    value = tl.load(source + KVH * D + dims, mask=there, other=0.0)
    block = tl.load(table + position // PAGE).to(tl.int64)
    target = cache + block * block_stride + head * (PAGE * D) + (position % PAGE) * D + dims
    writes = dims < tl.where(owner, D, 0)
    tl.store(target, key, mask=writes)
    tl.store(target + KVH * (PAGE * D), value, mask=writes)
    score = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1) * scale
    if SOFTCAP is not None:
        score = bounded(score, SOFTCAP)
    top = tl.where(owner, score, float("-inf"))
    first = tl.arange(0, TILE)[None, :] == tl.where(owner, 0, -1)
    mass = tl.where(first, 1.0, tl.zeros([query.shape[0], TILE], tl.float32))
    acc = tl.where(owner, value.to(tl.float32), 0.0) + tl.zeros([query.shape[0], DIM], tl.float32)
    return top, mass, acc


@opens_early
@reads_early("positions", "slot_mapping")
@triton.jit
def _qkv_rope(
    qkv,
    positions,
    slot_mapping,
    cos,
    sin,
    q_weight,
    k_weight,
    cache,
    qkv_stride,
    block_stride,
    eps,
    numbers,
    numbers_stride,
    kv_scales,
    row_scales,
    column_scales,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dims = tl.arange(0, HALF)[None, :]
    # The tables that @reads_early names need no wait (see kernels/launch.py).
    position = tl.load(positions + token).to(tl.int64)
    place = tl.load(slot_mapping + token).to(tl.int64)
    half_dim = dims < D // 2
    c = tl.load(cos + position * (D // 2) + dims, mask=half_dim, other=0.0)
    s = tl.load(sin + position * (D // 2) + dims, mask=half_dim, other=0.0)
    inside = half_dim & (heads < H + 2 * KVH)
    is_query = heads < H
    if column_scales is not None:
        factors = column_scales + heads * D + dims
        low_factor = tl.load(factors, mask=inside, other=0.0)
        high_factor = tl.load(factors + D // 2, mask=inside, other=0.0)
    if PDL:
        # Decode attention asks for keys of earlier steps before its own wait.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = qkv + token * qkv_stride + heads * D + dims
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    if column_scales is not None:
        row_scale = tl.load(row_scales + token)
        low, high = low * (low_factor * row_scale), high * (high_factor * row_scale)
    a, b = low, high
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        dtype = qkv.dtype.element_ty
        q_low = tl.load(q_weight + dims, mask=half_dim, other=0.0).to(tl.float32)
        q_high = tl.load(q_weight + D // 2 + dims, mask=half_dim, other=0.0).to(tl.float32)
        k_low = tl.load(k_weight + dims, mask=half_dim, other=0.0).to(tl.float32)
        k_high = tl.load(k_weight + D // 2 + dims, mask=half_dim, other=0.0).to(tl.float32)
        # Rounded where the models' own code rounds.
        a = (
            ((low * scale).to(dtype).to(tl.float32) * tl.where(is_query, q_low, k_low))
            .to(dtype)
            .to(tl.float32)
        )
        b = (
            ((high * scale).to(dtype).to(tl.float32) * tl.where(is_query, q_high, k_high))
            .to(dtype)
            .to(tl.float32)
        )
    is_value = heads >= H + KVH
    out_low = tl.where(is_value, low, a * c - b * s).to(qkv.dtype.element_ty)
    out_high = tl.where(is_value, high, b * c + a * s).to(qkv.dtype.element_ty)
    tl.store(source, out_low, mask=inside & is_query)
    tl.store(source + D // 2, out_high, mask=inside & is_query)
    # A token that is padding writes no head.
    last = tl.where(place >= 0, H + 2 * KVH, 0)
    if FORMAT != "":
        store_coded(
            cache,
            numbers,
            out_low,
            out_high,
            place,
            heads - H,
            (heads >= H) & (heads < last),
            block_stride,
            numbers_stride,
            kv_scales,
            2 * KVH,
            D,
            HALF,
            PAGE,
            FORMAT,
        )
        return
    target = (
        cache
        + (place // PAGE) * block_stride
        + (heads - H) * (PAGE * D)
        + (place % PAGE) * D
        + dims
    )
    writes = half_dim & (heads >= H) & (heads < last)
    tl.store(target, out_low, mask=writes)
    tl.store(target + D // 2, out_high, mask=writes)


def qkv_rope(
    qkv: Tensor | UnscaledProduct,
    positions: Tensor,
    slot_mapping: Tensor,
    rope: Rope,
    cache: Tensor | CodedCache,
    num_heads: int,
    kv_scales: Tensor | None = None,
) -> None:
    """Rotate qkv's queries in place, and write its keys (rotated) and values to the cache.

    Where qkv is not scaled yet, its queries are then.

    qkv [T, (H + 2 KVH) * D], rows contiguous; positions int32 [T]; slot_mapping int32 [T], block id
    * block size + offset, or negative for a token that is padding; cache [blocks, 2 KVH, block
    size, D], the keys' heads first, or such a cache of codes; kv_scales float16 [2 KVH]: scales of
    codes of 8 bits, where they are not 0; None or 0 for a scale of each token.
    """
    _, twice_kv_heads, page, dim = cache.shape
    row_scales, column_scales = None, None
    if isinstance(qkv, UnscaledProduct):
        qkv, row_scales, column_scales = qkv
    tokens, heads = qkv.shape[0], num_heads + twice_kv_heads
    half = next_power_of_2(dim // 2)
    per_program = _heads_of_program(heads, half)
    q_weight, k_weight = rope.norms or (rope.cos, rope.cos)
    memory, numbers, numbers_stride, code_format = parts_of(cache)
    _qkv_rope[(tokens, cdiv(heads, per_program))](
        qkv,
        positions,
        slot_mapping,
        rope.cos,
        rope.sin,
        q_weight,
        k_weight,
        memory,
        qkv.stride(0),
        cache.stride(0),
        rope.eps,
        numbers,
        numbers_stride,
        kv_scales,
        row_scales,
        column_scales,
        num_heads,
        twice_kv_heads // 2,
        dim,
        half,
        per_program,
        page,
        rope.norms is not None,
        code_format,
        # A thread reads 16 bytes at once.
        num_warps=max(1, min(4, per_program * half // 256)),
        **pdl(qkv),
    )


def _heads_of_program(heads: int, half: int) -> int:
    """Return the heads of a program, of `half` pairs of numbers each.

    It has four warps, or two where that leaves no program with few heads.
    """
    most = min(next_power_of_2(heads), max(1, 1024 // half))
    return most if heads % most == 0 else max(1, most // 2)
