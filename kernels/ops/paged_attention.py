"""Attention over keys and values gathered from the paged cache: the torch reference.

The paged cache is that of Kwon et al. 2023.

On a CPU the bits of a query's result depend on its own position and inputs alone. So keys are
padded to lengths that follow from the position (see `padded_length`), everything is computed in
float32, and there are at least FEWEST_QUERIES queries, because libraries multiply fewer by other
kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sidestep.kernels.ops.silu_mul import by_rows

FEWEST_QUERIES = 4
"""The number of queries is padded to a multiple of this."""
_SHORT, _STEP = 64, 512


def padded_length(length: int) -> int:
    """Return the number of keys that a query at the end of `length` tokens is computed with.

    It is 64, 128, 256 or a multiple of 512.
    """
    if length > _STEP:
        return -(-length // _STEP) * _STEP
    return max(_SHORT, 1 << (length - 1).bit_length())


def decode_attention(
    q: Tensor,
    keys_values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of one query token a row.

    Query heads that share a KV head are laid out along the query dimension, so keys and values are
    never repeated.

    q [R, H, D]; keys_values float32 [R, 2 KVH, L, D], keys first, each row padded with finite
    values to the common length; mask float32 [R, 1, 1, L], 0 for tokens to attend to and -inf for
    others; softcap: the bound of the scores, if any; sinks float32 [H]: scores that only the
    softmax's denominator has. Returns [R, H, D] of q's type.
    """
    rows, heads, dim = q.shape
    kv_heads = keys_values.shape[1] // 2
    k, v = keys_values.split(kv_heads, 1)
    group = heads // kv_heads
    missing = -group % FEWEST_QUERIES
    query = pad(q.float().reshape(rows, kv_heads, group, dim), (0, 0, 0, missing))
    if sinks is not None:
        sinks = pad(sinks.view(kv_heads, group, 1), (0, 0, 0, missing))
    out = _attention(query, k, v, mask, scale, softcap, sinks)
    return out[:, :, :group].reshape(rows, heads, dim).to(q.dtype)


def prefill_attention(
    q: Tensor,
    keys_values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of consecutive tokens of one sequence.

    q [N, H, D]; keys_values float32 [L, 2 KVH, D], keys first; mask float32 [N, L], 0 for tokens to
    attend to and -inf for others; softcap, sinks: see decode_attention. Returns [N, H, D] of q's
    type.
    """
    count, heads, dim = q.shape
    kv_heads = keys_values.shape[1] // 2
    group, missing = heads // kv_heads, -count % FEWEST_QUERIES
    k, v = (
        keys_values.unflatten(1, (2, kv_heads, 1))
        .permute(1, 2, 3, 0, 4)
        .expand(-1, -1, group, -1, -1)
    )
    query = pad(q.float().view(count, kv_heads, group, dim).permute(1, 2, 0, 3), (0, 0, 0, missing))
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1, 1)
    out = _attention(query, k, v, pad(mask, (0, 0, 0, missing)), scale, softcap, sinks)
    return out[:, :, :count].permute(2, 0, 1, 3).reshape(count, heads, dim).to(q.dtype)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of q [B, H, N, D] to k, v [B, H, L, D].

    sinks: of a shape that expands to [B, H, N, 1]. A single problem (B = H = 1) is computed twice.
    torch gives each problem to one thread, but it starts no thread for a single problem. The
    library would then split its products among threads of its own.
    """
    lone = q.shape[0] * q.shape[1] == 1
    if lone:
        q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    if softcap is not None or sinks is not None:
        out = _in_parts(q, k, v, mask, scale, softcap, sinks)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out[:1] if lone else out


def _in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention with bounded scores or with sinks, which torch's own does not have."""
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        flat = scores.div_(softcap).flatten(0, 2)
        scores = by_rows(torch.ops.aten.tanh.out, flat).view_as(scores).mul_(softcap)
    scores += mask
    if sinks is None:
        return scores.softmax(-1) @ v
    # The sink is one more key, whose value is zero.
    with_sink = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return with_sink.softmax(-1)[..., :-1].contiguous() @ v


def causal_mask(first: int, count: int, length: int, window: int, device: torch.device) -> Tensor:
    """Return the causal mask, float32 [N, L]: 0 where a token attends to a key, -inf elsewhere.

    The N = `count` tokens start at position `first`. window: number of tokens, itself included,
    that a token attends to; 0 for all.
    """
    query = torch.arange(first, first + count, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    hidden = key > query
    if window:
        hidden |= key <= query - window
    return torch.zeros(count, length, device=device).masked_fill_(hidden, -torch.inf)
