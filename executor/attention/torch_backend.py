"""Attention by torch operations: the default on a CPU, and what other backends are compared with."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionShape
from sidestep.executor.input_batch import HostBatch
from sidestep.ipc.step import Int32
from sidestep.kernels.kv_write import write_kv
from sidestep.kernels.paged_attention import decode_attention, prefill_attention


class TorchAttention(AttentionBackend):
    """Cache layout: for each layer, keys and values as [num_blocks * block_size, KVH, D]."""

    def __init__(self, shape: AttentionShape, num_blocks: int, block_size: int, dtype: torch.dtype,
                 device: torch.device) -> None:
        self._shape = shape
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._scale = shape.head_dim**-0.5
        size = (num_blocks * block_size, shape.num_kv_heads, shape.head_dim)
        # Zeros: padding gathers blocks that were never written, and 0 x NaN would spread.
        self._k = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self._v = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_layers)]
        self._windows = sorted(set(shape.windows))

    def begin_step(self, batch: HostBatch, slot_mapping: Tensor) -> None:
        self._slot_mapping = slot_mapping
        self._num_decode = batch.num_decode_rows
        if self._num_decode:
            self._begin_decode(batch)
        self._chunks = [(start, stop, self._positions(batch, row))
                        for row, (start, stop) in enumerate(batch.token_ranges) if row >= self._num_decode]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_cache, v_cache = self._k[layer], self._v[layer]
        write_kv(k_cache, v_cache, k, v, self._slot_mapping)
        window = self._shape.windows[layer]
        if not self._chunks:
            return decode_attention(q, k_cache, v_cache, self._decode_gather, self._decode_masks[window], self._scale)
        out = torch.empty_like(q)
        if self._num_decode:
            out[:self._num_decode] = decode_attention(
                q[:self._num_decode], k_cache, v_cache, self._decode_gather, self._decode_masks[window], self._scale)
        for start, stop, gather in self._chunks:
            out[start:stop] = prefill_attention(q[start:stop], k_cache, v_cache, gather, window, self._scale)
        return out

    def _positions(self, batch: HostBatch, row: int) -> Tensor:
        """Cache positions of all tokens of one row, int64 [L]."""
        length = int(batch.seq_lens[row])
        blocks = batch.block_tables[row, :-(-length // self._block_size)].astype(np.int64)
        places = (blocks[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)[:length]
        return torch.from_numpy(places).to(self._device)

    def _begin_decode(self, batch: HostBatch) -> None:
        """Cache positions of the decode rows' tokens, each row padded to the longest, int64 [R * L]; and the masks."""
        rows = self._num_decode
        lengths = batch.seq_lens[:rows]
        longest = int(lengths.max())
        blocks = batch.block_tables[:rows, :-(-longest // self._block_size)].astype(np.int64)
        places = (blocks[:, :, None] * self._block_size + np.arange(self._block_size)).reshape(rows, -1)[:, :longest]
        self._decode_gather = torch.from_numpy(np.ascontiguousarray(places).reshape(-1)).to(self._device)
        self._decode_masks = {window: self._mask(lengths, window) for window in self._windows}

    def _mask(self, lengths: Int32, window: int) -> Tensor | None:
        """0 where a decode row attends, -inf elsewhere: [R, 1, 1, L]; None if every row attends everywhere."""
        longest = int(lengths.max())
        if int(lengths.min()) == longest and not (window and longest > window):
            return None
        key = np.arange(longest)
        hidden = key >= lengths[:, None]
        if window:
            hidden |= key < lengths[:, None] - window
        mask = torch.from_numpy(hidden).to(self._device)[:, None, None]
        return torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(mask, -torch.inf)
