"""Experts whose matrices a checkpoint stores one by one."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.executor.layers.experts.fused_experts import experts_of_rank
from sidestep.executor.layers.experts.shared_expert import expert_matrix
from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.quantized.coded_matrix import CodedMatrix


def matrix_names(spec: ExpertsSpec, name: str, expert: int) -> tuple[str, str, str]:
    """Return the names of an expert's matrices: gate, up and down. name: the layer's."""
    gate, up, down = (
        f"{name}.experts.{expert}.{one}"
        for one in (spec.names.gate, spec.names.up, spec.names.down)
    )
    return gate, up, down


def experts_elsewhere(spec: ExpertsSpec, name: str, parallel: Parallel) -> Iterator[str]:
    """Yield how the names of weights begin that only other ranks need. name: the layer's."""
    own = experts_of_rank(spec, parallel)
    for expert in range(spec.num_experts):
        if expert not in own:
            yield f"{name}.experts.{expert}."


class SeparateExperts:
    """Loads a rank's part of matrices that are stored apart."""

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
        self._name = name
        self.experts = experts_of_rank(spec, parallel)
        self._part = range(spec.width) if spec.whole else parallel.share(spec.width)

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        gate, up, _ = matrix_names(self.spec, self._name, expert)
        shape = self.spec.width, self._hidden_size
        parts = {one: self._weights.matrix(one, shape, rows=self._part) for one in (gate, up)}
        return expert_matrix(stacked(parts))

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the matrix [D, F]."""
        _, _, down = matrix_names(self.spec, self._name, expert)
        shape = self._hidden_size, self.spec.width
        return expert_matrix(self._weights.matrix(down, shape, columns=self._part))
