"""Experts whose matrices a checkpoint stores as one tensor for all, with biases (gpt-oss).

Gate and up are stored in turns. Where ranks have a part of the intermediate size, the first one
adds the last product's bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Shape, Weights
from sidestep.ipc.model.layer_spec import MXFP4_BLOCK, ExpertsSpec
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix


def gate_first(in_turns: Tensor) -> Tensor:
    """Return rows that are those of gate and up in turns with all of the gate first."""
    return torch.cat([in_turns[0::2], in_turns[1::2]])


def experts_of_rank(spec: ExpertsSpec, parallel: Parallel) -> range:
    """Return the experts of which a rank has all or a part."""
    return parallel.share(spec.num_experts) if spec.whole else range(spec.num_experts)


class FusedExperts:
    """Loads the matrices of a rank's experts, or its part of them, which are stored transposed."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        parallel: Parallel,
    ) -> None:
        self.spec = spec
        self._hidden_size = hidden_size
        self._weights = weights
        self._name = f"{name}.experts"
        self.experts = experts_of_rank(spec, parallel)
        self._part = range(spec.width) if spec.whole else parallel.share(spec.width)
        self._rows = range(2 * self._part.start, 2 * self._part.stop)
        self._adds_bias = spec.whole or parallel.rank == 0

    def gate_up(self, expert: int) -> ExpertMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        shape = self.spec.num_experts, self._hidden_size, 2 * self.spec.width
        stored = self._item("gate_up_proj", shape, expert, columns=self._rows)
        return ExpertMatrix(gate_first(stored.T), self._gate_up_bias(expert))

    def down(self, expert: int) -> ExpertMatrix:
        """Return the matrix [D, F]."""
        shape = self.spec.num_experts, self.spec.width, self._hidden_size
        stored = self._item("down_proj", shape, expert, rows=self._part)
        return ExpertMatrix(stored.T.contiguous(), self._down_bias(expert))

    def _gate_up_bias(self, expert: int) -> Tensor:
        shape = self.spec.num_experts, 2 * self.spec.width
        return gate_first(self._item("gate_up_proj_bias", shape, expert, rows=self._rows))

    def _down_bias(self, expert: int) -> Tensor | None:
        bias = self._item("down_proj_bias", (self.spec.num_experts, self._hidden_size), expert)
        return bias if self._adds_bias else None

    def _item(
        self,
        name: str,
        shape: Shape,
        expert: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        return self._weights.item(f"{self._name}.{name}", shape, expert, rows, columns)


class Mxfp4Experts(FusedExperts):
    """Loads the same from blocks of MXFP4, which are not transposed. Parts end where blocks do."""

    def gate_up(self, expert: int) -> ExpertMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        shape = self.spec.num_experts, 2 * self.spec.width, self._hidden_size // MXFP4_BLOCK
        values, scales = self._packed("gate_up_proj", shape, expert, rows=self._rows)
        return ExpertMatrix(gate_first(values), self._gate_up_bias(expert), gate_first(scales))

    def down(self, expert: int) -> ExpertMatrix:
        """Return the matrix [D, F]."""
        shape = self.spec.num_experts, self._hidden_size, self.spec.width // MXFP4_BLOCK
        blocks = range(self._part.start // MXFP4_BLOCK, self._part.stop // MXFP4_BLOCK)
        values, scales = self._packed("down_proj", shape, expert, columns=blocks)
        return ExpertMatrix(values, self._down_bias(expert), scales)

    def _packed(
        self,
        name: str,
        shape: Shape,
        expert: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return an expert's bytes and its scales. shape: of all scales."""
        stored = f"{self._name}.{name}"
        part = expert, rows, columns
        blocks = self._weights.packed_item(f"{stored}_blocks", (*shape, MXFP4_BLOCK // 2), *part)
        return blocks.flatten(1), self._weights.packed_item(f"{stored}_scales", shape, *part)
