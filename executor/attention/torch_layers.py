"""A layer's blocks as the torch backend reads and writes them, by format of keys and values."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from sidestep.executor.attention.kv_memory import KvMemory
from sidestep.ipc.model.layer_size import LayerKv
from sidestep.kernels.ops.kv_quantization import CODE_TYPES, CodeFormat, dequantize, quantize


class LayerBlocks(abc.ABC):
    """The blocks of one layer."""

    @abc.abstractmethod
    def write(self, kv: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
        """Store tokens kv [T, 2 KVH, D], the keys first; return them as they will be read.

        slots: int64 [T], block id * block size + offset, all different. scales: see
        `AttentionBackend.attend`. Returns float32.
        """

    @abc.abstractmethod
    def read(self, blocks: Tensor) -> Tensor:
        """Return the tokens of blocks, int64 [N]: float32 [N, block size, 2 KVH, D]."""


def layer_blocks(
    memory: KvMemory, layer: int, kept: LayerKv, block_size: int, dtype: torch.dtype
) -> LayerBlocks:
    """Return a layer's blocks. dtype: the model's type."""
    own = memory.of_layer(layer)
    if kept.format == "model":
        blocks: LayerBlocks = PlainBlocks(own, kept, block_size, dtype)
    else:
        blocks = CodedBlocks(own, kept, block_size, kept.format)
    return FiniteBlocks(blocks) if memory.mixes_codes else blocks


class FiniteBlocks(LayerBlocks):
    """Blocks whose unused tokens may be of another layer's form, and so stand for any number.

    Attention gives them the weight 0, which a product with a number that is not finite would lose.
    """

    def __init__(self, blocks: LayerBlocks) -> None:
        self._blocks = blocks

    def write(self, kv: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
        """Store tokens."""
        return self._blocks.write(kv, slots, scales)

    def read(self, blocks: Tensor) -> Tensor:
        """Return the tokens of blocks, with 0 for all that is not finite."""
        return self._blocks.read(blocks).nan_to_num_(0.0, 0.0, 0.0)


class PlainBlocks(LayerBlocks):
    """Blocks in the model's type: [blocks, block size, 2 KVH, D]."""

    def __init__(self, memory: Tensor, kept: LayerKv, block_size: int, dtype: torch.dtype) -> None:
        self._cache = memory.view(dtype).unflatten(
            1, (block_size, 2 * kept.num_kv_heads, kept.head_dim)
        )
        self._size = block_size
        # A layer may have a part of a block's memory; then its blocks lie apart.
        self._tokens = self._cache.flatten(0, 1) if self._cache.is_contiguous() else None

    def write(self, kv: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
        """Store tokens."""
        if self._tokens is not None:
            self._tokens.index_copy_(0, slots, kv)
        else:
            self._cache[slots // self._size, slots % self._size] = kv
        return kv.float()

    def read(self, blocks: Tensor) -> Tensor:
        """Return the tokens of blocks."""
        return self._cache.index_select(0, blocks).float()


class CodedBlocks(LayerBlocks):
    """Blocks of codes [block size, 2 KVH, bytes of D], and behind them float16 [.., 1 or 2]."""

    def __init__(
        self, memory: Tensor, kept: LayerKv, block_size: int, code_format: CodeFormat
    ) -> None:
        heads, codes = 2 * kept.num_kv_heads, block_size * kept.code_bytes
        self._format, self._size = code_format, block_size
        self._codes = (
            memory[:, :codes].unflatten(1, (block_size, heads, -1)).view(CODE_TYPES[code_format])
        )
        self._numbers = memory[:, codes:].view(torch.float16).unflatten(1, (block_size, heads, -1))

    def write(self, kv: Tensor, slots: Tensor, scales: Tensor | None) -> Tensor:
        """Store the codes of tokens."""
        codes, numbers = quantize(kv, self._format, scales)
        place = slots // self._size, slots % self._size
        # Torch has no indexed writes of float8.
        self._codes.view(torch.uint8)[place] = codes.view(torch.uint8)
        self._numbers[place] = numbers
        return dequantize(codes, numbers, self._format)

    def read(self, blocks: Tensor) -> Tensor:
        """Return the tokens of blocks."""
        codes = self._codes.view(torch.uint8).index_select(0, blocks).view(self._codes.dtype)
        return dequantize(codes, self._numbers.index_select(0, blocks), self._format)
