"""Block copies in Triton: one program for each copy, layer and part of a block.

The reference is in kernels/ops/block_copy.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2


# The stride of layers depends on the number of blocks; as int64 it needs one kernel for any number.
@triton.jit
def _copy_blocks(
    caches, sources, targets, layer_stride: tl.int64, block_stride, BLOCK: tl.constexpr
):
    copy, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(sources + copy).to(tl.int64)
    if source < 0:
        return
    target = tl.load(targets + copy).to(tl.int64)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < block_stride
    base = caches + layer * layer_stride
    tl.store(
        base + target * block_stride + offsets,
        tl.load(base + source * block_stride + offsets, mask=inside),
        mask=inside,
    )


def copy_blocks(caches: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy blocks as kernels.ops.block_copy.copy_blocks does."""
    layers = caches.shape[0]
    block = min(8192, next_power_of_2(caches.stride(1)))
    grid = (len(sources), layers, cdiv(caches.stride(1), block))
    if len(sources):
        _copy_blocks[grid](
            caches, sources, targets, caches.stride(0), caches.stride(1), block, num_warps=8
        )
