"""Masks of logits: tokens that must not be sampled yet get minus infinity.

The tokens are a list of (row, token) pairs, which is often empty.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl


@triton.jit
def _mask_logits(logits, message, header, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(header)
    pairs = message + tl.load(header + 1)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        row = tl.load(pairs + index, mask=index < count, other=0).to(tl.int64)
        token = tl.load(pairs + count + index, mask=index < count, other=0)
        tl.store(logits + row * stride + token, float("-inf"), mask=index < count)


def mask_logits(logits: Tensor, message: Tensor, header: Tensor) -> None:
    """Set the listed logits to minus infinity, in place.

    logits [R, V]; header int32: the number of pairs, and the index in message (int32) where their
    rows are listed, followed by their tokens.
    """
    _mask_logits[(1,)](logits, message, header, logits.stride(0), 256, num_warps=4, **pdl(logits))
