"""Masks of allowed tokens, packed as bits, over rows of logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv

_BLOCK = 1024


@triton.jit
def _mask_tokens(
    logits, marks, words, vocab_size, logits_stride, words_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    mark = tl.load(marks + row).to(tl.int64)
    if mark == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(
        words + (mark - 1) * words_stride + token // 32, mask=token < vocab_size, other=-1
    )
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(
        logits + row * logits_stride + token, float("-inf"), mask=forbidden & (token < vocab_size)
    )


def mask_tokens(logits: Tensor, marks: Tensor, words: Tensor) -> None:
    """Mask tokens as kernels.ops.token_masks.mask_tokens does.

    The kernel runs among copies and kernels of torch, so it is launched without programmatic
    dependent launch: it starts when the kernels before it have ended.
    """
    rows, vocab_size = logits.shape
    _mask_tokens[(rows, cdiv(vocab_size, _BLOCK))](
        logits, marks, words, vocab_size, logits.stride(0), words.stride(0), _BLOCK, num_warps=4
    )
