"""How the layers of a model are divided into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.model.dense_size import layer_size, table_size
from sidestep.ipc.model.model_spec import ModelSpec

_ROWS, _CONTEXT = 64, 1024
"""A step that is meant to take equally long in all stages: so many decodes, each after so many
tokens."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: consecutive layers. The first also embeds, the last also has the
    head and samples.
    """

    index: int
    count: int
    """Stages of the pipeline."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether token ids come in."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether tokens go out."""
        return self.index == self.count - 1


def split_layers(spec: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Numbers of layers that make stages take about equally long. The last stage also has the head,
    so it may have fewer layers; of the others the first ones may have one more.
    """
    if num_stages == 1:
        return (spec.num_layers,)
    head = _head_cost(spec) / _layer_cost(spec)
    before = num_stages - 1

    def slowest(last: int) -> float:
        return max(-(-(spec.num_layers - last) // before), last + head)

    # With equal times the last stage takes more: it is the others that send.
    last = min(range(1, spec.num_layers - before + 1), key=lambda n: (slowest(n), -n))
    rest = spec.num_layers - last
    return (*(rest // before + (i < rest % before) for i in range(before)), last)


def stage_of(layers: tuple[int, ...], index: int) -> Stage:
    """One of the stages that have these numbers of layers."""
    first = sum(layers[:index])
    return Stage(index, len(layers), range(first, first + layers[index]))


def _layer_cost(spec: ModelSpec) -> float:
    """Return the values that a layer reads in such a step: its weights, keys and values."""
    size = layer_size(spec)
    return size.matrices + _ROWS * _CONTEXT * size.kv_per_token


def _head_cost(spec: ModelSpec) -> float:
    """Return the values that the output head reads in such a step."""
    return table_size(spec)
