"""Masks of allowed tokens, packed as bits, over rows of logits.

The kernel is in kernels/triton/token_masks_triton.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.kernels.gpu import on_gpu


def mask_tokens(logits: Tensor, marks: Tensor, words: Tensor) -> None:
    """Set each logit whose mask bit is 0 to -inf, in place.

    logits [R, V]; marks int32 [R]: 1 + the index of the row's mask in `words`, 0 for a row without
    a mask; words int32 [N, ceil(V / 32)], one bit a token, the lowest bit first.
    """
    if on_gpu(logits):
        from sidestep.kernels.triton import token_masks_triton

        token_masks_triton.mask_tokens(logits, marks, words)
        return
    rows = marks.nonzero().flatten()
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words.index_select(0, marks.index_select(0, rows) - 1)[:, :, None] >> shifts) & 1
    forbidden = (bits == 0).flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
