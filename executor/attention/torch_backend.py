"""Attention by torch operations: the default on a CPU, and what other backends are compared with.

Decode rows read a gathered copy of their keys and values. As long as the same rows decode, the copy of the step before
is only extended by each row's new token; it is gathered again when rows come or go, or when it would be too large to
keep. That is worth a third of a step of a small model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, Norms, StepBatch
from sidestep.executor.input_batch import HostBatch
from sidestep.executor.layers.rotary import FullRotaryTable
from sidestep.ipc.step import Int32, Int64
from sidestep.kernels.kv_write import write_kv
from sidestep.kernels.paged_attention import decode_attention, prefill_attention
from sidestep.kernels.rms_norm import rms_norm
from sidestep.kernels.rotary import apply_rotary

_COPY_LIMIT = 1 << 30
"""Bytes, in all layers, up to which the gathered copy is kept."""
_HEADROOM = 64
"""Tokens for which a kept copy has room to grow."""


class TorchAttention(AttentionBackend):
    """Cache layout: for each layer [num_blocks, block_size, 2 KVH, D], a token's keys before its values."""

    def __init__(self, setup: AttentionSetup) -> None:
        shape = self._shape = setup.shape
        self._block_size, self._dtype, self._device = setup.block_size, setup.dtype, setup.device
        self._norm_eps = setup.norm_eps
        self._scale = shape.head_dim**-0.5
        self._rotary_table = FullRotaryTable(setup.rotary, setup.dtype)
        size = (shape.num_layers, setup.num_blocks, setup.block_size, 2 * shape.num_kv_heads, shape.head_dim)
        # Zeros: padding reads blocks that were never written, and 0 x NaN would spread.
        self.cache = torch.zeros(size, dtype=setup.dtype, device=setup.device)
        self._layers = self.cache.unbind()
        self._windows = sorted(set(shape.windows))
        self._copies: list[Tensor | None] = [None] * shape.num_layers
        self._copied_entries = np.empty(0, np.int64)
        self._copied_lens = np.empty(0, np.int32)
        self._copy_room = 0

    def begin_step(self, batch: StepBatch) -> None:
        host = batch.host
        assert host is not None, "this backend needs the host's view of a step"
        self._rotary = self._rotary_table.rows(batch.positions)
        self._places = batch.places.long()
        self._num_decode = host.num_decode_rows
        if self._num_decode:
            self._begin_decode(host)
        self._chunks = [(start, stop, self._blocks_of(host, row), int(host.seq_lens[row]))
                        for row, (start, stop) in enumerate(host.token_ranges) if row >= self._num_decode]

    def attend(self, layer: int, qkv: Tensor, norms: Norms | None) -> Tensor:
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        by_head = qkv.view(-1, heads + 2 * kv_heads, self._shape.head_dim)
        if norms is not None:
            by_head[:, :heads] = rms_norm(by_head[:, :heads], norms[0], self._norm_eps)
            by_head[:, heads:heads + kv_heads] = rms_norm(by_head[:, heads:heads + kv_heads], norms[1], self._norm_eps)
        apply_rotary(by_head[:, :heads + kv_heads], *self._rotary)
        return self._attend(layer, by_head[:, :heads], by_head[:, heads:]).flatten(1)

    def _attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """q [T, H, D] to [T, H, D]."""
        cache, rows = self._layers[layer], self._num_decode
        write_kv(cache.flatten(0, 1), kv, self._places)
        window = self._shape.windows[layer]
        if not self._chunks:
            return self._decode(layer, q, kv, window)
        out = torch.empty_like(q)
        if rows:
            out[:rows] = self._decode(layer, q[:rows], kv[:rows], window)
        for start, stop, blocks, length in self._chunks:
            keys_values = cache.index_select(0, blocks).flatten(0, 1)[:length]
            out[start:stop] = prefill_attention(q[start:stop], keys_values, window, self._scale)
        return out

    def _decode(self, layer: int, q: Tensor, kv: Tensor, window: int) -> Tensor:
        copy = self._copies[layer]
        if copy is None or not self._extend_copy:
            copy = self._gather(layer)
        else:
            copy[self._row_index, :, self._last_index] = kv
        return decode_attention(q, copy[:, :, :self._longest], self._masks[window], self._scale)

    def _gather(self, layer: int) -> Tensor:
        """[R, 2 KVH, room, D] with each row's tokens, kept for the next step if it is small enough. A copy that is kept
        has each head's tokens side by side, which is how attention reads them."""
        gathered = self._layers[layer].index_select(0, self._decode_blocks)
        copy = gathered.view(self._num_decode, -1, *gathered.shape[2:]).transpose(1, 2)
        if not self._keep_copy:
            self._copies[layer] = None
            return copy
        kept = self._copies[layer] = copy.contiguous()
        return kept

    def _begin_decode(self, batch: HostBatch) -> None:
        rows = self._num_decode
        entries, lengths = batch.entries[:rows], batch.seq_lens[:rows]
        self._longest = int(lengths.max())
        # By entry, not by slot: the next request in a slot may well be one token longer than the last one became.
        self._extend_copy = (
            self._longest <= self._copy_room and np.array_equal(entries, self._copied_entries)
            and np.array_equal(lengths, self._copied_lens + 1))
        if self._extend_copy:
            self._last_index = torch.from_numpy(lengths.astype(np.int64) - 1).to(self._device)
        else:
            self._plan_gather(batch, entries)
        self._copied_lens = lengths.copy()
        self._masks = {window: self._mask(lengths, window) for window in self._windows}

    def _plan_gather(self, batch: HostBatch, entries: Int64) -> None:
        rows, size = self._num_decode, self._block_size
        width = -(-self._longest // size)
        token_bytes = self._shape.bytes_per_token(self._dtype)
        roomy = min(-(-(self._longest + _HEADROOM) // size), batch.block_tables.shape[1])
        self._keep_copy = rows * roomy * size * token_bytes <= _COPY_LIMIT
        width = roomy if self._keep_copy else width
        self._decode_blocks = torch.from_numpy(
            batch.block_tables[:rows, :width].astype(np.int64).reshape(-1)).to(self._device)
        self._row_index = torch.arange(rows, device=self._device)
        self._copied_entries = entries.copy()
        self._copy_room = width * size if self._keep_copy else 0

    def _blocks_of(self, batch: HostBatch, row: int) -> Tensor:
        """The blocks of one row's tokens, int64."""
        count = -(-int(batch.seq_lens[row]) // self._block_size)
        return torch.from_numpy(batch.block_tables[row, :count].astype(np.int64)).to(self._device)

    def _mask(self, lengths: Int32, window: int) -> Tensor | None:
        """0 where a decode row attends, -inf elsewhere: [R, 1, 1, L]; None if every row attends everywhere."""
        longest = self._longest
        if int(lengths.min()) == longest and not (window and longest > window):
            return None
        key = np.arange(longest)
        hidden = key >= lengths[:, None]
        if window:
            hidden |= key < lengths[:, None] - window
        mask = torch.from_numpy(hidden).to(self._device)[:, None, None]
        return torch.zeros(mask.shape, dtype=self._dtype, device=self._device).masked_fill_(mask, -torch.inf)
