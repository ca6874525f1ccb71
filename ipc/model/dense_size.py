"""Numbers of parameters and of cached values of a dense decoder, from its shape alone.

The planner (frontend/planning/topology.py), the split of layers over stages, the choice of CUDA
graphs and the workers' KV caches all count from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.model.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """Counts of one layer, or of one rank's part of it; numbers, not bytes."""

    matrices: int
    """Weights of the layer's products."""
    vectors: int
    """Biases, and the weights of norms."""
    kv_per_token: int
    """Keys and values of a token in the cache."""

    @property
    def parameters(self) -> int:
        """All weights of the layer."""
        return self.matrices + self.vectors


def kv_per_token(num_kv_heads: int, head_dim: int) -> int:
    """Return the number of values that a token has in one layer's cache."""
    return 2 * num_kv_heads * head_dim


def layer_size(spec: ModelSpec, num_ranks: int = 1) -> LayerSize:
    """Return the size of the part that one of `num_ranks` tensor-parallel ranks has of a layer.

    Norms are counted on every rank, since every rank has them. So are the biases of projections to
    the residual stream.
    """
    hidden, dim, width = spec.hidden_size, spec.head_dim, spec.intermediate_size // num_ranks
    heads, kv_heads = spec.num_heads // num_ranks, max(1, spec.num_kv_heads // num_ranks)
    qkv_bias = spec.attention_bias * dim * (heads + 2 * kv_heads)
    return LayerSize(
        matrices=hidden * (dim * (2 * heads + 2 * kv_heads) + 3 * width),
        vectors=qkv_bias
        + spec.attention_output_bias * hidden
        + spec.mlp_bias * (2 * width + hidden)
        + 2 * dim * spec.qk_norm
        + 2 * hidden,
        kv_per_token=kv_per_token(kv_heads, dim),
    )


def table_size(spec: ModelSpec, num_ranks: int = 1) -> int:
    """Return the size of a rank's part of the embedding or of the output head, padding included."""
    return -(-spec.vocab_size // num_ranks) * spec.hidden_size


def num_parameters(
    spec: ModelSpec, num_ranks: int = 1, num_layers: int | None = None, *, first: bool, last: bool
) -> int:
    """Return the number of parameters of one of the tensor-parallel ranks of a stage.

    num_layers: layers of the stage; None for all. first, last: whether the stage has the embedding,
    and whether it has the last norm and the output head.
    """
    table = table_size(spec, num_ranks)
    shares_table = first and last and spec.tie_word_embeddings
    return (
        (spec.num_layers if num_layers is None else num_layers)
        * layer_size(spec, num_ranks).parameters
        + first * table
        + last * (spec.hidden_size + (0 if shares_table else table))
    )
