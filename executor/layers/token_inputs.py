"""Vectors of each token for each layer, from a table and the token's embedding (Gemma 4).

The table is spread over the ranks by its rows. The matrices are small, so each rank has all of them
and computes the same.
"""

from __future__ import annotations

from torch import Tensor

from sidestep.executor.layers.linear import Linear
from sidestep.executor.layers.norms import load_norm
from sidestep.executor.layers.vocab import VocabParallelEmbedding, vocab_shard
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import NormSpec, TokenInputSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.kernels.ops.gelu_mul import gelu_mul
from sidestep.kernels.ops.rms_norm import Stream, add, join_columns
from sidestep.kernels.ops.silu_mul import silu_mul


def load_token_inputs(spec: ModelSpec, weights: Weights, parallel: Parallel) -> TokenInputs | None:
    """Return what makes the vectors, in a model whose layers take any. It has one stage."""
    return None if spec.token_input is None else TokenInputs(spec, weights, parallel)


class TokenInputs:
    """Makes the vectors of all layers."""

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: Parallel) -> None:
        inputs = spec.token_input
        assert inputs is not None, "the layers take no vectors"
        self._width, values = inputs.width, spec.num_layers * inputs.width
        shard = vocab_shard(
            weights, "model.embed_tokens_per_layer", inputs.vocab_size, values, parallel
        )
        self._table = VocabParallelEmbedding(shard, parallel, inputs.width**0.5)
        self._projection = Linear(
            weights.matrix("model.per_layer_model_projection", (values, spec.hidden_size))
        )
        self._scale = spec.hidden_size**-0.5
        name = "model.per_layer_projection_norm.weight"
        self._norm = load_norm(spec.norm, weights, name, inputs.width)

    def __call__(self, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return the vectors of all layers [T, L * P], for tokens int [T], embedded [T, D]."""
        projected = self._projection(embedded).mul_(self._scale)
        normed = self._norm(projected.view(-1, self._width)).view_as(projected)
        return normed.add_(self._table.vectors(token_ids)).mul_(2**-0.5)


class TokenInput:
    """Adds to the residual stream behind a layer what follows from the layer's vectors."""

    def __init__(
        self,
        spec: TokenInputSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        norm_spec: NormSpec,
    ) -> None:
        """Load the weights. name: the layer's."""
        self._width = spec.width
        self._multiply = gelu_mul if spec.activation == "gelu_tanh" else silu_mul
        self._gate = Linear(
            weights.matrix(f"{name}.per_layer_input_gate", (spec.width, hidden_size))
        )
        self._projection = Linear(
            weights.matrix(f"{name}.per_layer_projection", (hidden_size, spec.width))
        )
        norm = f"{name}.post_per_layer_input_norm.weight"
        self._norm = load_norm(norm_spec, weights, norm, hidden_size)

    def warm_up(self, stream: Stream) -> None:
        """Run the products alone."""
        self.add(stream, stream.hidden.new_zeros(len(stream.hidden), self._width))

    def add(self, stream: Stream, vectors: Tensor) -> Stream:
        """Return the stream with the part of the vectors [T, P], on its way through its norm."""
        gated = self._multiply(join_columns([self._gate(stream.hidden), vectors]))
        part = self._norm(self._projection(gated))
        return Stream(add(stream.hidden, part), stream.norm)
