"""Attention over keys and values that were gathered from the paged cache (Kwon et al. 2023): the torch reference.

Query heads that share a KV head are laid along the query dimension, so keys and values are never repeated for decode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def decode_attention(q: Tensor, keys_values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """One query token a row.

    q [R, H, D]; keys_values [R, 2 KVH, L, D], keys first, each row padded with finite values to the longest; mask
    [R, 1, 1, L] of q's type, 0 for tokens to attend to and -inf for others, or None. Returns [R, H, D].
    """
    rows, heads, dim = q.shape
    kv_heads = keys_values.shape[1] // 2
    k, v = keys_values.split(kv_heads, 1)
    query = q.view(rows, kv_heads, heads // kv_heads, dim)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def prefill_attention(q: Tensor, keys_values: Tensor, window: int, scale: float) -> Tensor:
    """The last N tokens of one sequence of L tokens, each attending to itself and what is before it.

    q [N, H, D]; keys_values [L, 2 KVH, D], keys first; window: how many tokens, itself included, a token attends to, 0
    for all. Returns [N, H, D].
    """
    count, heads, dim = q.shape
    length, kv_heads = keys_values.shape[0], keys_values.shape[1] // 2
    group = heads // kv_heads
    k, v = keys_values.unflatten(1, (2, kv_heads, 1)).permute(1, 2, 3, 0, 4).expand(-1, -1, group, -1, -1)
    query = q.view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    plain = count == length and not window
    mask = None if plain else causal_mask(count, length, window, q.device)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, is_causal=plain, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)


def causal_mask(count: int, length: int, window: int, device: torch.device) -> Tensor:
    """bool [N, L]: True where the n-th of the last N tokens of L attends."""
    query = torch.arange(length - count, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    allowed = key <= query
    return allowed & (key > query - window) if window else allowed
