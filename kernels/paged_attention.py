"""Attention over the paged KV cache (Kwon et al. 2023), the torch reference and CPU backend.

Rows of one token (decode) are computed together: their keys are gathered to one length and masked. Rows of more tokens
(prompt chunks) are computed one by one, without a mask where none is needed. Query heads that share a KV head are laid
along the query dimension, so keys and values are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, gather: Tensor, mask: Tensor | None,
                     scale: float) -> Tensor:
    """One query token a row.

    q [R, H, D]; caches [num_blocks * block_size, KVH, D]; gather int64 [R * L], the cache positions of each row's keys,
    padded to the longest row with any valid position; mask [R, 1, 1, L] of q's type, 0 for keys and -inf for padding, or
    None when all rows are of one length. Returns [R, H, D].
    """
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[1]
    k = k_cache.index_select(0, gather).view(rows, -1, kv_heads, dim).transpose(1, 2)
    v = v_cache.index_select(0, gather).view(rows, -1, kv_heads, dim).transpose(1, 2)
    out = scaled_dot_product_attention(q.view(rows, kv_heads, heads // kv_heads, dim), k, v, attn_mask=mask, scale=scale)
    return out.reshape(rows, heads, dim)


def prefill_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, gather: Tensor, window: int, scale: float) -> Tensor:
    """The last N tokens of one sequence of L tokens, each attending to itself and what is before it.

    q [N, H, D]; gather int64 [L], the cache positions of all tokens of the sequence; window: how many tokens, itself
    included, a token attends to, 0 for all. Returns [N, H, D].
    """
    count, heads, dim = q.shape
    length, kv_heads = gather.shape[0], k_cache.shape[1]
    group = heads // kv_heads
    k = k_cache.index_select(0, gather).transpose(0, 1)[:, None]
    v = v_cache.index_select(0, gather).transpose(0, 1)[:, None]
    query = q.view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    if count == length and not window:
        out = scaled_dot_product_attention(query, k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1),
                                           is_causal=True, scale=scale)
    else:
        mask = causal_mask(count, length, window, q.device)
        out = scaled_dot_product_attention(query, k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1),
                                           attn_mask=mask, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(count, heads, dim)


def causal_mask(count: int, length: int, window: int, device: torch.device) -> Tensor:
    """bool [N, L]: True where the n-th of the last N tokens of L attends."""
    query = torch.arange(length - count, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    allowed = key <= query
    return allowed & (key > query - window) if window else allowed
