"""Self-attention of one layer: the projections around what the attention backend computes."""

from __future__ import annotations

from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.layers.linear import RowParallelLinear, column_parallel
from sidestep.executor.layers.weight_loader import Weights
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.ipc.model.layer_spec import AttentionSpec
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream


def rows_of_heads(heads: range, head_dim: int) -> range:
    """Return the rows of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


class Attention:
    """Self-attention of one layer. following: the norm after it."""

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        following: RmsNorm,
        parallel: Parallel,
    ) -> None:
        self._following = following
        heads, kv_heads = parallel.share(spec.num_heads), parallel.kv_heads(spec.num_kv_heads)
        q_rows, kv_rows = (
            rows_of_heads(heads, spec.head_dim),
            rows_of_heads(kv_heads, spec.head_dim),
        )
        total_q, total_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv = column_parallel(
            weights,
            [
                (f"{name}.q_proj", total_q, q_rows),
                (f"{name}.k_proj", total_kv, kv_rows),
                (f"{name}.v_proj", total_kv, kv_rows),
            ],
            hidden_size,
            bias=spec.bias,
        )
        self._width = len(q_rows)
        self._out = RowParallelLinear(
            weights,
            f"{name}.o_proj",
            hidden_size,
            total_q,
            q_rows,
            parallel,
            SumBuffer.ATTENTION,
            bias=spec.output_bias,
        )
        self._head_norms = (
            (
                weights.get(f"{name}.q_norm.weight", (spec.head_dim,)),
                weights.get(f"{name}.k_norm.weight", (spec.head_dim,)),
            )
            if spec.head_norms
            else None
        )

    def warm_up(self, stream: Stream) -> Stream:
        """Run the products alone."""
        return self._add(stream, self._qkv(stream)[:, : self._width].contiguous())

    def __call__(
        self, stream: Stream, layer: int, attention: AttentionBackend, rows: Tensor | None
    ) -> Stream:
        """Return the stream with attention added. rows: see Layer."""
        attended = attention.attend(layer, self._qkv(stream), self._head_norms)
        if rows is not None:
            stream, attended = stream.of_rows(rows), attended.index_select(0, rows)
        return self._add(stream, attended)

    def _add(self, stream: Stream, attended: Tensor) -> Stream:
        return self._out.add_to(stream.hidden, attended, self._following)
