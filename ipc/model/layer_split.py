"""Division of a model's layers into the stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from sidestep.ipc.model.layer_spec import LayerSpec, attention_of
from sidestep.ipc.model.model_size import table_size
from sidestep.ipc.model.model_spec import ModelSpec

_ROWS, _CONTEXT = 64, 1024
"""Decodes of the step that is meant to take equally long in all stages; tokens before each."""
_Split = tuple[int, int, tuple[int, ...]]
"""Costs of the slowest of some stages, the sum of the squares of all, and each stage's layers."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: consecutive layers.

    The first stage also embeds, the last also has the head and samples.
    """

    index: int
    count: int
    """Stages of the pipeline."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether the stage takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage samples tokens."""
        return self.index == self.count - 1


def why_one_stage(spec: ModelSpec) -> str | None:
    """Return why a model's layers cannot be divided into stages, or None if they can."""
    if spec.token_input is not None:
        return "its layers take vectors of token ids, which only the first stage has"
    if any(mixer.kv_back for mixer in attention_of(spec.layers)):
        return "its last layers read the keys and values of earlier layers"
    return None


def split_layers(spec: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Return the numbers of layers with which all stages take about equally long.

    The last stage also has the head, so it may have fewer layers; of the others, the first ones may
    have one more.
    """
    if num_stages == 1:
        return (spec.num_layers,)
    head = 0 if spec.pooling is not None else table_size(spec)
    costs = [_layer_cost(spec, layer) for layer in spec.layers]
    before = num_stages - 1
    splits = _even_splits(costs, before)
    # With equal times the last stage gets more layers, since only the others send.
    slowest, _, counts = min(
        (max(splits[end][0], sum(costs[end:]) + head), end, splits[end][2])
        for end in range(before, len(costs))
    )
    return (*counts, len(costs) - sum(counts))


def _even_splits(costs: list[int], num_stages: int) -> dict[int, _Split]:
    """Return the most even split of the first layers over the stages, by the number of layers.

    With equal costs, earlier stages get more layers.
    """
    before = list(accumulate(costs, initial=0))
    splits: dict[int, _Split] = {0: (0, 0, ())}
    for stage in range(1, num_stages + 1):
        splits = {
            end: min(
                (
                    (
                        max(slowest, before[end] - before[start]),
                        squares + (before[end] - before[start]) ** 2,
                        (*counts, end - start),
                    )
                    for start, (slowest, squares, counts) in splits.items()
                    if start < end
                ),
                key=lambda split: (split[0], split[1], split[2][-1]),
            )
            for end in range(stage, len(costs) - (num_stages - stage))
        }
    return splits


def stage_of(layers: tuple[int, ...], index: int) -> Stage:
    """Return one of the stages that have these numbers of layers."""
    first = sum(layers[:index])
    return Stage(index, len(layers), range(first, first + layers[index]))


def _layer_cost(spec: ModelSpec, layer: LayerSpec) -> int:
    """Return the values that a layer moves in such a step: weights, keys and values, states."""
    size = layer.size(spec.hidden_size)
    return size.matrices + _ROWS * (_CONTEXT * size.kv_per_token + 2 * size.state)
