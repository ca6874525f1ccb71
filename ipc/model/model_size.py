"""Numbers of parameters of a model's parts, from the specifications of its layers."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.ipc.model.layer_size import LayerSize
from sidestep.ipc.model.layer_spec import LayerSpec
from sidestep.ipc.model.model_spec import ModelSpec


def layers_size(
    spec: ModelSpec, num_ranks: int = 1, layers: Sequence[LayerSpec] | None = None
) -> LayerSize:
    """Return the size of one tensor-parallel rank's part of these layers; None for all layers."""
    chosen = spec.layers if layers is None else layers
    return sum((one.size(spec.hidden_size, num_ranks) for one in chosen), LayerSize())


def table_size(spec: ModelSpec, num_ranks: int = 1) -> int:
    """Return the size of a rank's part of the embedding or of the output head, padding included."""
    return -(-spec.vocab_size // num_ranks) * spec.hidden_size


def inputs_size(spec: ModelSpec, num_ranks: int = 1) -> LayerSize:
    """Return the size of a rank's part of what makes the layers' own vectors of tokens."""
    inputs = spec.token_input
    if inputs is None:
        return LayerSize()
    return inputs.common_size(spec.hidden_size, spec.num_layers, num_ranks)


def num_parameters(
    spec: ModelSpec,
    num_ranks: int = 1,
    layers: Sequence[LayerSpec] | None = None,
    *,
    first: bool,
    last: bool,
) -> int:
    """Return the number of parameters of one of the tensor-parallel ranks of a stage.

    layers: those of the stage; None for all. first, last: whether the stage has the embedding, and
    whether it has the last norm and the output head. A model that pools has no such head, and
    the one that it may have instead is small.
    """
    table = table_size(spec, num_ranks)
    shares_table = first and last and spec.tie_word_embeddings
    return (
        layers_size(spec, num_ranks, layers).parameters
        + first * (table + inputs_size(spec, num_ranks).parameters)
        + last * (spec.hidden_size + (0 if shares_table or spec.pooling is not None else table))
    )
