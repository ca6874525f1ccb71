"""Masks of allowed tokens, packed as bits, over rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["rows", "masks"])
def _mask_tokens(logits, rows, masks, words, vocab_size, logits_stride, words_stride, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0))
    mask = tl.load(masks + tl.program_id(0))
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + mask * words_stride + token // 32, mask=token < vocab_size, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=forbidden & (token < vocab_size))


def mask_tokens(logits: Tensor, rows: Tensor, masks: Tensor, words: Tensor) -> None:
    """As in token_masks.py. Runs among kernels of torch, so it is launched when what is before it has ended."""
    vocab_size = logits.shape[1]
    _mask_tokens[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        logits, rows, masks, words, vocab_size, logits.stride(0), words.stride(0), _BLOCK, num_warps=4)
