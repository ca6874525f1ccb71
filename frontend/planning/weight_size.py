"""Bytes of a model's weights in a worker, from the specifications of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sidestep.ipc.model.layer_size import MatrixSize
from sidestep.ipc.model.layer_split import Stage
from sidestep.ipc.model.model_size import inputs_size, table_size
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.quantization.weight_scheme import HEAD, QuantizationSpec, WeightScheme

_PLAIN = QuantizationSpec(method="")


class WeightSize(NamedTuple):
    """Bytes of one rank's weights."""

    held: int
    """All of them."""
    read: int
    """Bytes that a step reads at least: of the embedding only the rows of its tokens."""


def weight_size(
    spec: ModelSpec, num_ranks: int, stage: Stage, itemsize: int, *, keeps_codes: bool
) -> WeightSize:
    """Return the bytes of one of the tensor-parallel ranks of a stage.

    itemsize: bytes of a number in the run's type. keeps_codes: whether the device multiplies with
    quantized matrices as they are, rather than with their numbers.
    """
    held, read = 0, 0.0
    for index in stage.layers:
        vectors = spec.layers[index].size(spec.hidden_size, num_ranks).vectors * itemsize
        held, read = held + vectors, read + vectors
        for matrix, scheme in _forms(spec, index, num_ranks):
            own = matrix.num_bytes(scheme if keeps_codes else None, itemsize)
            held, read = held + own, read + own * float(matrix.active)
    if stage.is_first:
        inputs = inputs_size(spec, num_ranks)
        held += (table_size(spec, num_ranks) + inputs.parameters) * itemsize
        read += (inputs.active + inputs.vectors) * itemsize
    if stage.is_last:
        norm, head = spec.hidden_size * itemsize, _head(spec, num_ranks, itemsize, keeps_codes)
        shared = stage.is_first and spec.tie_word_embeddings and _rounded_head(spec) is None
        held, read = held + norm + (0 if shared else head), read + norm + head
    return WeightSize(held, int(read))


def _forms(
    spec: ModelSpec, layer: int, num_ranks: int
) -> Iterator[tuple[MatrixSize, WeightScheme | None]]:
    """Yield the matrices of a layer, and how each is quantized."""
    quantization = spec.quantization or _PLAIN
    for one in spec.layers[layer].matrices(spec.hidden_size, num_ranks):
        scheme = quantization.scheme(f"model.layers.{layer}.{one.name}")
        yield one, one.scheme or (scheme if one.may_be_coded else None)


def _head(spec: ModelSpec, num_ranks: int, itemsize: int, keeps_codes: bool) -> int:
    """Return the bytes of a rank's part of the output head, which models that pool do not have."""
    if spec.pooling is not None:
        return 0
    scheme = None if spec.tie_word_embeddings else (spec.quantization or _PLAIN).scheme(HEAD)
    scheme = scheme or _rounded_head(spec)
    if scheme is None or not keeps_codes:
        return table_size(spec, num_ranks) * itemsize
    return scheme.num_bytes(-(-spec.vocab_size // num_ranks), spec.hidden_size, itemsize)


def _rounded_head(spec: ModelSpec) -> WeightScheme | None:
    """Return the form that a plain output head is rounded to; None if it stays plain."""
    return (spec.quantization or _PLAIN).head
