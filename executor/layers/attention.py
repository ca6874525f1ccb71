"""Self-attention of one layer: the projections around what the attention backend computes."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.attention.base import Attends, AttentionBackend, Norms
from sidestep.executor.attention.rotary import pair_order
from sidestep.executor.layers.linear import RowParallelLinear, column_parallel
from sidestep.executor.layers.norms import SharedNorm, load_norm
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.kv_scales import load_kv_scales
from sidestep.executor.weights.rearranged_weights import RearrangedWeights, StoredRows
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import AttentionSpec, NormSpec
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream, join_columns
from sidestep.kernels.ops.silu_mul import sigmoid_mul
from sidestep.kernels.unfinished_product import finished


def rows_of_heads(heads: range, head_dim: int) -> range:
    """Return the rows of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


class OrderedHeads(RearrangedWeights):
    """The weights of attention, with the values of each query and key in another order."""

    def __init__(self, weights: Weights, order: Tensor, name: str) -> None:
        """Put the values of each head into this order. order: int64 [D]. name: the layer's."""
        super().__init__(weights)
        self._order = order
        self._ordered_parts = {f"{name}.{one}_{what}" for one in "qk" for what in ("proj", "norm")}

    def place(self, name: str, rows: range, num_rows: int) -> StoredRows | None:
        """Return the rows of whole heads, and their order."""
        if name not in self._ordered_parts:
            return None
        firsts = torch.arange(0, len(rows), len(self._order), device=self._order.device)
        return StoredRows(name, num_rows, rows, (firsts[:, None] + self._order).flatten())


class GatedQueries(RearrangedWeights):
    """The weights of attention whose q projection has each head's gate behind its query.

    The gates have a name of their own, gate_proj.
    """

    def __init__(self, weights: Weights, head_dim: int, name: str) -> None:
        """Read from `weights`. name: the layer's."""
        super().__init__(weights)
        self._head_dim = head_dim
        self._halves = {f"{name}.q_proj": 0, f"{name}.gate_proj": 1}
        self._stored = f"{name}.q_proj"

    def place(self, name: str, rows: range, num_rows: int) -> StoredRows | None:
        """Return the rows of whole heads, of which half are wanted."""
        if name not in self._halves:
            return None
        both = range(2 * rows.start, 2 * rows.stop)
        halves = torch.arange(len(both)).view(-1, 2, self._head_dim)
        return StoredRows(self._stored, 2 * num_rows, both, halves[:, self._halves[name]].flatten())


def _head_norms(
    spec: AttentionSpec, norm_spec: NormSpec, weights: Weights, name: str
) -> Norms | None:
    """Return the norms of each head's queries and keys; for queries alone, theirs twice."""
    if not spec.head_norms:
        return None
    q_norm, *k_norm = (
        load_norm(norm_spec, weights, f"{name}.{one}_norm.weight", spec.head_dim).weight
        for one in ("q" if spec.kv_back else "qk")
    )
    return q_norm, k_norm[0] if k_norm else q_norm


def _value_norm(spec: AttentionSpec, norm_spec: NormSpec, weights: Weights) -> RmsNorm | None:
    """Return the norm of each head's values, if the layer has one and values of its own."""
    if not spec.value_norms or spec.kv_back:
        return None
    ones = torch.ones(spec.head_dim, dtype=weights.dtype, device=weights.device)
    return RmsNorm(ones, norm_spec.eps)


class Attention:
    """Self-attention of one layer.

    after: the norm of its result, if there is one. following: the norm of the stream behind it.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        following: RmsNorm,
        parallel: Parallel,
        *,
        norm_spec: NormSpec,
        after: RmsNorm | None = None,
    ) -> None:
        self._following, self._spec = following, spec
        order = None if spec.rope is None else pair_order(spec.rope, spec.head_dim)
        heads, kv_heads = parallel.share(spec.num_heads), parallel.kv_heads(spec.num_kv_heads)
        q_rows, kv_rows = (
            rows_of_heads(heads, spec.head_dim),
            rows_of_heads(kv_heads, spec.head_dim),
        )
        total_q, total_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        if spec.gate:
            weights = GatedQueries(weights, spec.head_dim, name)
        ordered = weights if order is None else OrderedHeads(weights, order, name)
        kv_parts = [(f"{name}.{one}_proj", total_kv, kv_rows) for one in "kv"]
        parts = [
            (f"{name}.q_proj", total_q, q_rows),
            *kv_parts[: spec.num_kv_projections],
            *([(f"{name}.gate_proj", total_q, q_rows)] if spec.gate else []),
        ]
        self._qkv = column_parallel(ordered, parts, hidden_size, bias=spec.bias)
        self._width, kv_width = len(q_rows), 0 if spec.kv_back else len(kv_rows)
        after_keys = self._width + kv_width
        self._keys = slice(self._width, after_keys)
        self._values = slice(after_keys, after_keys + kv_width)
        self._gate_from = self._values.stop if spec.gate else None
        """First column of the gate, which is the product's last part; None without a gate."""
        self._out = RowParallelLinear(
            weights,
            f"{name}.o_proj",
            hidden_size,
            total_q,
            q_rows,
            parallel,
            SumBuffer.ATTENTION,
            bias=spec.output_bias,
            after=after,
        )
        self._head_norms = _head_norms(spec, norm_spec, ordered, name)
        self._value_norm = _value_norm(spec, norm_spec, weights)
        self._sinks = (
            weights.get(f"{name}.sinks", (spec.num_heads,), rows=heads).float()
            if spec.sinks
            else None
        )
        self._kv_scales = (
            load_kv_scales(weights, name, spec.num_kv_heads, kv_heads)
            if spec.kv_scales and not spec.kv_back
            else None
        )
        self._row_norms = [
            (columns, SharedNorm(norm_spec, ordered, f"{name}.{one}_norm.weight", *part, parallel))
            for one, columns, part in (
                ("q", slice(0, self._width), (total_q, q_rows)),
                ("k", self._keys, (total_kv, kv_rows)),
            )
            if spec.row_norms and not (one == "k" and spec.kv_back)
        ]
        changes = spec.gate, spec.keys_as_values, self._row_norms, self._value_norm
        self._is_plain = not any(changes)
        """Whether attention takes the projections as they come."""

    @property
    def first_product(self) -> ProductBehind | None:
        """The product of the stream, if its matrix is coded."""
        codes = self._qkv.codes
        return None if codes is None else ProductBehind(codes, crowded=True)

    @property
    def may_share(self) -> bool:
        """Whether its products leave other processors alone in steps of many rows."""
        return self._is_plain and self._qkv.may_share and self._out.may_share

    def warm_up(self, stream: Stream) -> Stream:
        """Run the products alone."""
        qkv = finished(self._qkv.unfinished(stream)) if self._is_plain else self._qkv(stream)
        return self.add(stream, qkv[:, : self._width].contiguous())

    def __call__(
        self, stream: Stream, layer: int, attention: AttentionBackend, rows: Tensor | None
    ) -> Stream:
        """Return the stream with attention added. rows: see Layer."""
        attended = self.attended(stream, layer, attention)
        if rows is not None:
            stream, attended = stream.of_rows(rows), attended.index_select(0, rows)
        return self.add(stream, attended)

    def attended(self, stream: Stream, layer: int, attention: Attends) -> Tensor:
        """Return the heads' results, [T, H * D]."""
        constants = self._head_norms, self._sinks, self._kv_scales
        if self._is_plain:
            return attention.attend(layer, self._qkv.unfinished(stream), *constants)
        qkv = self._with_values(self._qkv(stream))
        for columns, norm in self._row_norms:
            norm(qkv[:, columns])
        attended = attention.attend(layer, qkv[:, : self._gate_from], *constants)
        if self._gate_from is not None:
            sigmoid_mul(attended, qkv[:, self._gate_from :])
        return attended

    def _with_values(self, qkv: Tensor) -> Tensor:
        """Return the projections with the values as they are kept."""
        if self._spec.keys_as_values:
            values_from = self._values.start
            parts = [qkv[:, :values_from], qkv[:, self._keys], qkv[:, values_from:]]
            qkv = join_columns([part for part in parts if part.shape[1]])
        if self._value_norm is not None:
            self._value_norm.of_heads(qkv[:, self._values])
        return qkv

    def add(self, stream: Stream, attended: Tensor) -> Stream:
        """Return the stream with the heads' results [T, H * D] added."""
        return self._out.add_to(stream.hidden, attended, self._following)
