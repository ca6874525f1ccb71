"""Masks of logits: tokens that must not be sampled yet get minus infinity.

The tokens are a list of (row, token, length) triples, which is often empty. A row's logits are
masked as long as there are fewer tokens before them than the length says. Only the device knows how
many there are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import pdl


@triton.jit(do_not_specialize=("queries",))
def _mask_logits(
    logits, message, header, lens, stride, queries, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.load(header)
    triples = message + tl.load(header + 1)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        listed = index < count
        row = tl.load(triples + index, mask=listed, other=0).to(tl.int64)
        token = tl.load(triples + count + index, mask=listed, other=0)
        length = tl.load(triples + 2 * count + index, mask=listed, other=0)
        for query in range(0, queries):
            at = row * queries + query
            early = tl.load(lens + at, mask=listed, other=0) < length
            tl.store(logits + at * stride + token, float("-inf"), mask=listed & early)


def mask_logits(
    logits: Tensor, message: Tensor, header: Tensor, lens: Tensor, queries: int = 1
) -> None:
    """Set the listed logits to minus infinity, in place, where they come too early.

    logits [R * queries, V], those of a row's queries one after the other; lens int32 [R * queries]:
    the tokens before each. header int32: the number of triples, and the index in message (int32)
    where their rows are listed, followed by their tokens and lengths.
    """
    _mask_logits[(1,)](
        logits, message, header, lens, logits.stride(0), queries, 256, num_warps=4, **pdl(logits)
    )
