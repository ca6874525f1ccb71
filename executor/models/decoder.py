"""The dense decoder that the Llama family shares: what differs between its members is in ModelSpec.

Weights are pulled by their checkpoint names while the layers are built, each rank its own part (Megatron's layout:
attention by heads, the MLP by its inner width, two all-reduces a layer).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionShape
from sidestep.executor.layers.linear import RowParallelLinear, column_parallel
from sidestep.executor.layers.vocab import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from sidestep.executor.parallel_state import Parallel
from sidestep.executor.weight_loader import Weights
from sidestep.ipc.model_spec import ModelSpec
from sidestep.kernels.rms_norm import RmsNorm


def rows_of_heads(heads: range, head_dim: int) -> range:
    """Rows of a projection that belong to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def attention_shape(spec: ModelSpec, parallel: Parallel) -> AttentionShape:
    """One rank's part of the model's attention."""
    return AttentionShape(
        num_layers=spec.num_layers, num_heads=len(parallel.share(spec.num_heads)),
        num_kv_heads=len(parallel.kv_heads(spec.num_kv_heads)), head_dim=spec.head_dim, windows=spec.windows)


class Attention:
    """Self-attention of one layer."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, norm: RmsNorm, parallel: Parallel) -> None:
        self._norm = norm
        heads, kv_heads = parallel.share(spec.num_heads), parallel.kv_heads(spec.num_kv_heads)
        q_rows, kv_rows = rows_of_heads(heads, spec.head_dim), rows_of_heads(kv_heads, spec.head_dim)
        total_q, total_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv = column_parallel(
            weights, [(f"{name}.q_proj", total_q, q_rows), (f"{name}.k_proj", total_kv, kv_rows),
                      (f"{name}.v_proj", total_kv, kv_rows)], spec.hidden_size, bias=spec.attention_bias)
        self._width = len(q_rows)
        self._out = RowParallelLinear(weights, f"{name}.o_proj", spec.hidden_size, total_q, q_rows, parallel,
                                      bias=spec.attention_output_bias)
        self._head_norms = (weights.get(f"{name}.q_norm.weight", (spec.head_dim,)),
                            weights.get(f"{name}.k_norm.weight", (spec.head_dim,))) if spec.qk_norm else None

    def warm_up(self, hidden: Tensor) -> None:
        """Runs the products alone."""
        self._out.add_to(hidden, self._qkv(hidden, self._norm)[:, :self._width].contiguous())

    def __call__(self, hidden: Tensor, layer: int, attention: AttentionBackend) -> Tensor:
        return self._out.add_to(hidden, attention.attend(layer, self._qkv(hidden, self._norm), self._head_norms))


class Mlp:
    """The gated MLP of one layer."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, norm: RmsNorm, parallel: Parallel) -> None:
        self._norm = norm
        width, part = spec.intermediate_size, parallel.share(spec.intermediate_size)
        self._gate_up = column_parallel(
            weights, [(f"{name}.gate_proj", width, part), (f"{name}.up_proj", width, part)], spec.hidden_size,
            bias=spec.mlp_bias)
        self._down = RowParallelLinear(weights, f"{name}.down_proj", spec.hidden_size, width, part, parallel,
                                       bias=spec.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._down.add_to(hidden, self._gate_up.gated(hidden, self._norm))


class Layer:
    """One decoder layer. Both halves take the residual stream [T, D], which they may write over, and return it with
    their part added."""

    def __init__(self, spec: ModelSpec, weights: Weights, index: int, parallel: Parallel) -> None:
        name = f"model.layers.{index}"

        def norm(kind: str) -> RmsNorm:
            return RmsNorm(weights.get(f"{name}.{kind}_layernorm.weight", (spec.hidden_size,)), spec.rms_norm_eps)

        self._index = index
        self._attention = Attention(spec, weights, f"{name}.self_attn", norm("input"), parallel)
        self._mlp = Mlp(spec, weights, f"{name}.mlp", norm("post_attention"), parallel)

    def warm_up(self, hidden: Tensor) -> None:
        """Runs the products alone."""
        self._attention.warm_up(hidden)
        self._mlp(hidden)

    def __call__(self, hidden: Tensor, attention: AttentionBackend) -> Tensor:
        return self._mlp(self._attention(hidden, self._index, attention))


class DecoderForCausalLM:
    """The whole model of one rank."""

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: Parallel) -> None:
        shard = vocab_shard(weights, "model.embed_tokens", spec.vocab_size, spec.hidden_size, parallel)
        self._embedding = VocabParallelEmbedding(shard, parallel)
        self._layers = [Layer(spec, weights, i, parallel) for i in range(spec.num_layers)]
        self._norm = RmsNorm(weights.get("model.norm.weight", (spec.hidden_size,)), spec.rms_norm_eps)
        if not spec.tie_word_embeddings:
            shard = vocab_shard(weights, "lm_head", spec.vocab_size, spec.hidden_size, parallel)
        self._head = VocabParallelHead(shard, spec.vocab_size, parallel)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Runs a layer's products for each of these numbers of tokens. The library chooses among many kernels by size,
        and loads one when it is first used, for which it stops the device."""
        norm = self._norm.weight
        for num_tokens in sizes:
            self._layers[0].warm_up(norm.new_zeros(num_tokens, len(norm)))

    def __call__(self, token_ids: Tensor, attention: AttentionBackend, logits_rows: Tensor | None) -> Tensor:
        """Logits [R, V] of the tokens at `logits_rows` (int [R]; None for all) of token_ids int [T]."""
        hidden = self._embedding(token_ids)
        for layer in self._layers:
            hidden = layer(hidden, attention)
        return self._head(hidden if logits_rows is None else hidden.index_select(0, logits_rows), self._norm)
