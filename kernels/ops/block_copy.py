"""Copies of KV blocks, many in one launch, for copy-on-write and swapping within the cache."""

from __future__ import annotations

from torch import Tensor

from sidestep.kernels.gpu import on_gpu


def copy_blocks(caches: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy block sources[i] to block targets[i] in every layer.

    caches is [layers, blocks, ...] and contiguous; sources and targets are int32 [N] on its device.
    A negative source is skipped. No block is a source of one copy and the target of another.
    """
    if on_gpu(caches):
        from sidestep.kernels.triton.block_copy_triton import copy_blocks as launch

        launch(caches, sources, targets)
        return
    kept = sources >= 0
    caches[:, targets[kept].long()] = caches[:, sources[kept].long()]
