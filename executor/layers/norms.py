"""Norms with the weights of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.weights.weight_loader import Weights
from sidestep.ipc.model.layer_spec import NormSpec
from sidestep.kernels.native import rows as native
from sidestep.kernels.ops.rms_norm import RmsNorm


def load_norm(spec: NormSpec, weights: Weights, name: str, width: int) -> RmsNorm:
    """Return the norm of rows [.., width] whose weight has this name in the checkpoint."""
    weight = weights.get(name, (width,))
    if spec.offset:
        return RmsNorm(weight.float() + spec.offset, spec.eps)
    return RmsNorm(weight, spec.eps)


class SharedNorm:
    """RMSNorm of rows that are spread over the ranks: the queries or keys of all heads.

    A key head that several ranks hold counts once.
    """

    def __init__(
        self,
        spec: NormSpec,
        weights: Weights,
        name: str,
        total: int,
        own: range,
        parallel: Parallel,
    ) -> None:
        """Load the weights of this rank's part. total, own: width of whole rows and this part."""
        self._weight = weights.get(name, (total,), rows=own)
        self._eps, self._total = spec.eps, total
        self._parallel = parallel
        self._copies = len(own) * parallel.size // total
        """Ranks that hold the same part."""

    def __call__(self, x: Tensor) -> None:
        """Norm x [T, own] in place."""
        if self._parallel.size == 1 and native.rms_norm(x, self._weight, self._eps, out=x) is x:
            return
        wide = x.float()
        norms = torch.linalg.vector_norm(wide, 2, -1, True)
        squares = self._parallel.all_reduce(norms.square_()) / self._copies
        scale = (squares / self._total + self._eps).rsqrt_()
        x.copy_((wide * scale).to(x.dtype).mul_(self._weight))
