"""The dense decoder that the Llama family shares: what differs between its members is in ModelSpec.

Weights are pulled by their checkpoint names while the layers are built, each rank its own part (Megatron's layout:
attention by heads, the MLP by its inner width, two all-reduces a layer).
"""

from __future__ import annotations

from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionShape
from sidestep.executor.layers.linear import RowParallelLinear, column_parallel
from sidestep.executor.layers.vocab import VocabParallelEmbedding, VocabParallelHead, vocab_shard
from sidestep.executor.parallel_state import Parallel
from sidestep.executor.weight_loader import Weights
from sidestep.ipc.model_spec import ModelSpec
from sidestep.kernels.rms_norm import add_rms_norm, rms_norm


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

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, parallel: Parallel) -> None:
        heads, kv_heads = parallel.share(spec.num_heads), parallel.kv_heads(spec.num_kv_heads)
        q_rows, kv_rows = rows_of_heads(heads, spec.head_dim), rows_of_heads(kv_heads, spec.head_dim)
        total_q, total_kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self._qkv = column_parallel(
            weights, [(f"{name}.q_proj", total_q, q_rows), (f"{name}.k_proj", total_kv, kv_rows),
                      (f"{name}.v_proj", total_kv, kv_rows)], spec.hidden_size, bias=spec.attention_bias)
        self._out = RowParallelLinear(weights, f"{name}.o_proj", spec.hidden_size, total_q, q_rows, parallel,
                                      bias=spec.attention_output_bias)
        self._norms = (weights.get(f"{name}.q_norm.weight", (spec.head_dim,)),
                       weights.get(f"{name}.k_norm.weight", (spec.head_dim,))) if spec.qk_norm else None

    def __call__(self, x: Tensor, layer: int, attention: AttentionBackend) -> Tensor:
        return self._out(attention.attend(layer, self._qkv(x), self._norms))


class Mlp:
    """The gated MLP of one layer."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, parallel: Parallel) -> None:
        width, part = spec.intermediate_size, parallel.share(spec.intermediate_size)
        self._gate_up = column_parallel(
            weights, [(f"{name}.gate_proj", width, part), (f"{name}.up_proj", width, part)], spec.hidden_size,
            bias=spec.mlp_bias)
        self._down = RowParallelLinear(weights, f"{name}.down_proj", spec.hidden_size, width, part, parallel,
                                       bias=spec.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._gate_up.gated(x))


class Layer:
    """One decoder layer, its norms fused with the residual additions before them."""

    def __init__(self, spec: ModelSpec, weights: Weights, index: int, parallel: Parallel) -> None:
        name = f"model.layers.{index}"
        self._index = index
        self._eps = spec.rms_norm_eps
        self._input_norm = weights.get(f"{name}.input_layernorm.weight", (spec.hidden_size,))
        self._attention = Attention(spec, weights, f"{name}.self_attn", parallel)
        self._post_norm = weights.get(f"{name}.post_attention_layernorm.weight", (spec.hidden_size,))
        self._mlp = Mlp(spec, weights, f"{name}.mlp", parallel)

    def __call__(self, x: Tensor | None, residual: Tensor, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """x is the output of the MLP before, None in the first layer; returns the MLP's output and the residual."""
        if x is None:
            x = rms_norm(residual, self._input_norm, self._eps)
        else:
            x, residual = add_rms_norm(x, residual, self._input_norm, self._eps)
        x = self._attention(x, self._index, attention)
        x, residual = add_rms_norm(x, residual, self._post_norm, self._eps)
        return self._mlp(x), residual


class DecoderForCausalLM:
    """The whole model of one rank."""

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: Parallel) -> None:
        shard = vocab_shard(weights, "model.embed_tokens", spec.vocab_size, spec.hidden_size, parallel)
        self._embedding = VocabParallelEmbedding(shard, parallel)
        self._layers = [Layer(spec, weights, i, parallel) for i in range(spec.num_layers)]
        self._norm = weights.get("model.norm.weight", (spec.hidden_size,))
        self._eps = spec.rms_norm_eps
        if not spec.tie_word_embeddings:
            shard = vocab_shard(weights, "lm_head", spec.vocab_size, spec.hidden_size, parallel)
        self._head = VocabParallelHead(shard, spec.vocab_size, parallel)

    def __call__(self, token_ids: Tensor, attention: AttentionBackend, logits_rows: Tensor | None) -> Tensor:
        """Logits [R, V] of the tokens at `logits_rows` (int [R]; None for all) of token_ids int [T]."""
        residual = self._embedding(token_ids)
        x: Tensor | None = None
        for layer in self._layers:
            x, residual = layer(x, residual, attention)
        assert x is not None
        if logits_rows is not None:
            x, residual = x.index_select(0, logits_rows), residual.index_select(0, logits_rows)
        x, _ = add_rms_norm(x, residual, self._norm, self._eps)
        return self._head(x)
