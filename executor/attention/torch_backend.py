"""Attention by torch operations: the default on a CPU, and the reference for other backends.

A query is computed with a number of keys that its position alone decides, in float32. So its bits
do not depend on what else a step computes, nor on how a prompt was cut into chunks. Queries of one
padded length are computed together.

Decode rows read a gathered copy of their keys and values, shortest row first. While the same rows
decode, a step only adds each row's new token to the copy of the step before. The copy is gathered
again when rows come or go, or when it would be too large to keep. Keeping it saves a third of a
step of a small model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, Norms, StepBatch
from sidestep.executor.attention.rotary import FullRotaryTable
from sidestep.executor.attention.torch_layers import layer_blocks
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.ipc.transport.step import Int32, Int64
from sidestep.kernels.ops.paged_attention import (
    causal_mask,
    decode_attention,
    padded_length,
    prefill_attention,
)
from sidestep.kernels.ops.rms_norm import rms_norm
from sidestep.kernels.ops.rotary import apply_rotary
from sidestep.kernels.unfinished_product import Product, finished

_COPY_LIMIT = 1 << 30
"""Bytes, in all layers, up to which the gathered copy is kept, unless the whole cache is
smaller."""
_HEADROOM = 64
"""Tokens for which a kept copy has room to grow."""
_MOST_QUERIES = 256
"""Tokens of a prompt that are computed together; bounds the size of the mask."""


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens of a prompt's chunk that are computed with the same number of keys."""

    tokens: slice
    """Their indices among the step's tokens."""
    num_keys: int
    masks: dict[int, Tensor]
    """Masks by window, for all layers."""


@dataclass(frozen=True)
class _Chunk:
    """The tokens of a row that has several in this step."""

    blocks: Tensor
    """int64 [groups, W]: the row's blocks, padded to the longest piece."""
    pieces: list[_Piece] = field(default_factory=list)


@dataclass(frozen=True)
class _DecodeGroup:
    """Rows of the copy that are computed with the same number of keys."""

    rows: slice
    num_keys: int
    masks: dict[int, Tensor]
    """Masks by window: float32 [R, 1, 1, L]."""


class TorchAttention(AttentionBackend):
    """Attention in torch on any device.

    Every query, also one of the tokens that a step adds, sees keys and values as they are read from
    the cache. So it does not matter which step wrote them.
    """

    def __init__(self, setup: AttentionSetup) -> None:
        shape = self._shape = setup.shape
        self._block_size, self._dtype, self._device = setup.block_size, setup.dtype, setup.device
        self._norm_eps = setup.norm_eps
        self._rotary_tables = [FullRotaryTable(table, setup.dtype) for table in setup.rotary]
        # Cleared: padding reads blocks that were never written, and 0 x NaN would spread.
        self.cache = setup.open_memory(cleared=True)
        self._places = [shape.place(layer) for layer in range(shape.num_layers)]
        self._layers = [
            layer_blocks(self.cache, layer, kept, setup.block_size, setup.dtype)
            for layer, kept in enumerate(setup.kv_layout.layers)
        ]
        self._token_bytes = setup.kv_layout.num_values * torch.float32.itemsize
        """Bytes of a token in the gathered copy, in all layers of a block."""
        self._num_groups = shape.num_groups
        self._copy_limit = min(_COPY_LIMIT, setup.num_blocks * setup.block_size * self._token_bytes)
        self._windows = sorted(set(shape.windows))
        self._copies: list[Tensor | None] = [None] * shape.num_layers
        self._copied_entries = np.empty(0, np.int64)
        self._copied_lens = np.empty(0, np.int32)
        self._copy_room = 0
        self._host_order: Int64 = np.zeros(0, np.int64)
        """Decode rows, shortest first."""
        self._order: Tensor | None = None
        # The plan of a step, from begin_step on.
        none = torch.zeros(0, dtype=torch.int64, device=setup.device)
        self._rotary = [(none, none)]
        self._slot_mapping = none
        self._chunks: list[_Chunk] = []
        self._groups: list[_DecodeGroup] = []
        self._num_decode = self._longest = 0
        self._extend_copy = self._keep_copy = False
        self._decode_blocks = self._row_index = self._last_index = none

    def begin_step(self, batch: StepBatch) -> None:
        """Plan the groups of decode rows and the pieces of prompts."""
        host = batch.host
        assert host is not None, "this backend needs the host's view of a step"
        self._rotary = [table.rows(batch.positions) for table in self._rotary_tables]
        self._slot_mapping = batch.slot_mapping.long()
        self._num_decode = host.num_decode_rows
        if self._num_decode:
            self._begin_decode(host)
        self._chunks = [
            self._plan_chunk(host, row) for row in range(self._num_decode, len(host.slots))
        ]

    def attend(
        self,
        layer: int,
        qkv: Product,
        norms: Norms | None,
        sinks: Tensor | None = None,
        kv_scales: Tensor | None = None,
    ) -> Tensor:
        """Norm and rotate queries and keys, then write the cache and attend."""
        qkv = finished(qkv)
        heads, kv_heads = self._shape.num_heads, self._shape.num_kv_heads
        by_head = qkv.view(len(qkv), -1, self._shape.head_dim)
        if norms is not None:
            by_head[:, :heads] = rms_norm(by_head[:, :heads], norms[0], self._norm_eps)
            by_head[:, heads : heads + kv_heads] = rms_norm(
                by_head[:, heads : heads + kv_heads], norms[1], self._norm_eps
            )
        turned = self._rotary[self._shape.table(layer)]
        apply_rotary(by_head[:, : heads + kv_heads], *turned)
        kv = by_head[:, heads:]
        if self._shape.source(layer) == layer:
            slots = self._slot_mapping[self._places[layer].group]
            kv = self._layers[layer].write(kv, slots, kv_scales)
        return self._attend(layer, by_head[:, :heads], kv, sinks).flatten(1)

    def _attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention [T, H, D] of q [T, H, D]. kv: float32, as it is stored."""
        blocks, rows, group = self._layers[layer], self._num_decode, self._places[layer].group
        if not self._chunks:
            return self._decode(layer, q, kv, sinks)
        out = torch.empty_like(q)
        if rows:
            out[:rows] = self._decode(layer, q[:rows], kv[:rows], sinks)
        for chunk in self._chunks:
            keys_values = blocks.read(chunk.blocks[group]).flatten(0, 1)
            for piece in chunk.pieces:
                out[piece.tokens] = prefill_attention(
                    q[piece.tokens],
                    keys_values[: piece.num_keys],
                    piece.masks[self._shape.windows[layer]],
                    self._shape.scale(layer),
                    self._shape.softcap(layer),
                    sinks,
                )
        return out

    def _decode(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """Return the attention of rows of one token, [R, H, D]. kv: float32, as it is stored."""
        if self._order is not None:
            q, kv = q.index_select(0, self._order), kv.index_select(0, self._order)
        source = self._shape.source(layer)
        copy = self._copies[source]
        if source == layer and copy is not None and self._extend_copy:
            copy[self._row_index, :, self._last_index] = kv
        elif source == layer or copy is None:
            copy = self._gather(layer)
        made = [
            decode_attention(
                q[group.rows],
                copy[group.rows, :, : group.num_keys],
                group.masks[self._shape.windows[layer]],
                self._shape.scale(layer),
                self._shape.softcap(layer),
                sinks,
            )
            for group in self._groups
        ]
        out = made[0] if len(made) == 1 else torch.cat(made)
        return (
            out if self._order is None else torch.empty_like(out).index_copy_(0, self._order, out)
        )

    def _gather(self, layer: int) -> Tensor:
        """Return float32 [R, 2 KVH, room, D] with each row's tokens.

        Keep it for the next step if it is small enough: a kept copy has each head's tokens side by
        side, as attention reads them.
        """
        blocks = self._decode_blocks[self._places[layer].group]
        gathered = self._layers[layer].read(blocks)
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
        # By entry, not by slot: the next request in a slot may well be one token longer than the
        # last request became.
        self._extend_copy = (
            padded_length(self._longest) <= self._copy_room
            and np.array_equal(entries, self._copied_entries)
            and np.array_equal(lengths, self._copied_lens + 1)
        )
        if not self._extend_copy:
            self._plan_gather(batch, entries)
        self._copied_lens = lengths.copy()
        # All rows grow by one token a step, so the order of their lengths stays.
        by_length = lengths[self._host_order]
        if self._extend_copy:
            self._last_index = torch.from_numpy(by_length.astype(np.int64) - 1).to(self._device)
        self._groups = list(self._group(by_length))

    def _plan_gather(self, batch: HostBatch, entries: Int64) -> None:
        rows, size = self._num_decode, self._block_size
        order = np.argsort(batch.seq_lens[:rows], kind="stable")
        self._host_order = order
        in_order = np.array_equal(order, np.arange(rows))
        self._order = None if in_order else torch.from_numpy(order).to(self._device)
        room = padded_length(self._longest)
        roomy = padded_length(min(self._longest + _HEADROOM, batch.block_tables.shape[2] * size))
        self._keep_copy = rows * roomy * self._token_bytes <= self._copy_limit
        width = -(-(roomy if self._keep_copy else room) // size)
        tables = _filled_up(batch.block_tables[: self._num_groups, :rows][:, order], width)
        self._decode_blocks = torch.from_numpy(tables).flatten(1).to(self._device)
        self._row_index = torch.arange(rows, device=self._device)
        self._copied_entries = entries.copy()
        self._copy_room = width * size if self._keep_copy else 0

    def _group(self, lengths: Int32) -> Iterator[_DecodeGroup]:
        """Yield groups of rows by the number of keys that they are computed with.

        lengths: [R], in the order of the rows' lengths.
        """
        padded = np.array([padded_length(length) for length in lengths.tolist()])
        cuts = [0, *(np.flatnonzero(np.diff(padded)) + 1).tolist(), len(lengths)]
        for first, last in pairwise(cuts):
            num_keys = int(padded[first])
            yield _DecodeGroup(
                slice(first, last),
                num_keys,
                {
                    window: self._mask(lengths[first:last], num_keys, window)
                    for window in self._windows
                },
            )

    def _mask(self, lengths: Int32, num_keys: int, window: int) -> Tensor:
        """Return a mask, float32 [R, 1, 1, L]: 0 where a decode row attends, -inf elsewhere."""
        key = np.arange(num_keys)
        hidden = key >= lengths[:, None]
        if window:
            hidden |= key < lengths[:, None] - window
        mask = torch.from_numpy(hidden).to(self._device)[:, None, None]
        return torch.zeros(mask.shape, device=self._device).masked_fill_(mask, -torch.inf)

    def _plan_chunk(self, batch: HostBatch, row: int) -> _Chunk:
        start, stop = batch.token_ranges[row]
        length = int(batch.seq_lens[row])
        first = length - (stop - start)
        width = -(-padded_length(length) // self._block_size)
        chunk = _Chunk(
            torch.from_numpy(_filled_up(batch.block_tables[: self._num_groups, row], width)).to(
                self._device
            )
        )
        position = first
        while position < length:
            num_keys = padded_length(position + 1)
            end = min(length, num_keys, position + _MOST_QUERIES)
            masks = {
                window: causal_mask(position, end - position, num_keys, window, self._device)
                for window in self._windows
            }
            tokens = slice(start + position - first, start + end - first)
            chunk.pieces.append(_Piece(tokens, num_keys, masks))
            position = end
        return chunk


def _filled_up(tables: Int32, width: int) -> Int64:
    """Return block tables [..., W] as [..., width].

    Missing entries become block 0; its tokens are masked, as are all tokens behind the row's own.
    """
    cut = tables[..., :width].astype(np.int64)
    return np.pad(cut, [(0, 0)] * (cut.ndim - 1) + [(0, width - cut.shape[-1])])
