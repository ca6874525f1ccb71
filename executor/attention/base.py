"""What a model needs of an attention backend. A new backend is a file here and a line in ipc.registry."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from sidestep.executor.input_batch import HostBatch


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of one rank's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Sliding window of each layer, 0 for none."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Size of one token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


class AttentionBackend(abc.ABC):
    """Owns the KV cache and its layout. `begin_step`, then `attend` for each layer in order."""

    @abc.abstractmethod
    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        """Allocates the cache. Raises torch.OutOfMemoryError or RuntimeError when there is no room."""

    @abc.abstractmethod
    def begin_step(self, batch: HostBatch, slot_mapping: Tensor) -> None:
        """Prepares what all layers share. slot_mapping int64 [T] on the device."""

    @abc.abstractmethod
    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Writes kv [T, 2 KVH, D] (keys, then values) to the cache, then attends: q [T, H, D] to [T, H, D]."""
