"""The gated MLP of one layer."""

from __future__ import annotations

from sidestep.executor.layers.linear import RowParallelLinear, column_parallel
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.peer_sums import SumBuffer
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import MlpSpec
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream


class Mlp:
    """The gated MLP of one layer.

    after: the norm of its result, if there is one. following: the norm of the stream behind it.
    """

    def __init__(
        self,
        spec: MlpSpec,
        hidden_size: int,
        weights: Weights,
        name: str,
        following: RmsNorm,
        parallel: Parallel,
        after: RmsNorm | None = None,
    ) -> None:
        self._following = following
        self._activation = spec.activation
        width, part = spec.width, parallel.share(spec.width)
        self._gate_up = column_parallel(
            weights,
            [(f"{name}.gate_proj", width, part), (f"{name}.up_proj", width, part)],
            hidden_size,
            bias=spec.bias,
        )
        self._down = RowParallelLinear(
            weights,
            f"{name}.down_proj",
            hidden_size,
            width,
            part,
            parallel,
            SumBuffer.MLP,
            bias=spec.bias,
            after=after,
        )

    @property
    def may_share(self) -> bool:
        """Whether it leaves other processors alone in steps of many rows, and adds in place."""
        plain = self._activation == "silu"
        return plain and self._gate_up.may_share and self._down.may_share

    def __call__(self, stream: Stream) -> Stream:
        """Return the stream with the MLP added."""
        inner = self._gate_up.inner(stream, self._activation)
        return self._down.add_to(stream.hidden, inner, self._following)
