"""Experts whose matrices a checkpoint stores one by one."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.executor.layers.experts.fused_experts import experts_of_rank
from sidestep.executor.layers.experts.shared_expert import expert_matrix
from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.several_matrices import are_rounded, several
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

_AT_ONCE = 32 << 20
"""Bytes of plain matrices that are rounded at once."""


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
        self._gate_ups: dict[int, ExpertMatrix | CodedMatrix] = {}
        self._downs: dict[int, ExpertMatrix | CodedMatrix] = {}
        """The experts that were loaded last, by their numbers."""

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the gate's matrix over the other's, [2 F, D]."""
        if expert not in self._gate_ups:
            run = self._run(expert)
            pairs = [matrix_names(self.spec, self._name, one)[:2] for one in run]
            names = [name for pair in pairs for name in pair]
            shape = self.spec.width, self._hidden_size
            found = several(self._weights, names, shape, rows=self._part)
            parts = dict(zip(names, found, strict=True))
            self._gate_ups = {
                one: expert_matrix(stacked({name: parts[name] for name in pair}))
                for one, pair in zip(run, pairs, strict=True)
            }
        return self._gate_ups[expert]

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        """Return the matrix [D, F]."""
        if expert not in self._downs:
            run = self._run(expert)
            names = [matrix_names(self.spec, self._name, one)[2] for one in run]
            shape = self._hidden_size, self.spec.width
            found = several(self._weights, names, shape, columns=self._part)
            self._downs = dict(zip(run, map(expert_matrix, found), strict=True))
        return self._downs[expert]

    def _run(self, expert: int) -> range:
        """Return the experts that are loaded at once, from this one on.

        They are more than one where they are rounded while they load.
        """
        if not are_rounded(self._weights):
            return range(expert, expert + 1)
        size = 2 * self.spec.width * self._hidden_size * self._weights.dtype.itemsize
        return range(expert, min(expert + max(1, _AT_ONCE // size), self.experts.stop))
