"""Linear layers of a tensor-parallel rank, laid out for the CPU where that is faster.

Two layouts serve a few rows on a CPU. A small float32 weight is stored transposed: the plain product then has the least
overhead. Any other weight is packed once in the blocked form of oneDNN's kernels, which reads memory best. The
operators for that are private to torch; where they are missing, or fail, the plain product serves. For a single row the
plain product reads a large float32 weight faster, so that is kept beside the packed one while memory is plentiful.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sidestep.executor.parallel_state import Parallel
from sidestep.executor.peer_sums import Place
from sidestep.executor.weight_loader import Weights
from sidestep.kernels.gpu import on_gpu
from sidestep.kernels.linear import add_linear, gated_linear, linear
from sidestep.kernels.rms_norm import BegunNorm, RmsNorm, Stream, normed
from sidestep.kernels.silu_mul import silu_mul

_PACK_FOR_ROWS = 8
"""The batch size that the packed layout is chosen for."""
_SMALL = 3 << 18
"""Up to this many elements a transposed weight is faster than a packed one; see docs/performance.md."""


class Linear:
    """x W^T + b. x [T, in]; returns [T, out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_rows, self.num_columns = weight.shape
        self._bias = bias
        self._weight: Tensor | None = weight
        self._transposed: Tensor | None = None
        self._packed: Tensor | None = None
        if not on_gpu(weight):
            self._lay_out_for_cpu(weight)

    def __repr__(self) -> str:
        kind = "packed" if self._packed is not None else "transposed" if self._transposed is not None else "plain"
        return f"Linear({self.num_columns} -> {self.num_rows}, {kind})"

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Of a stream: of its norm. out: where to, on a GPU."""
        if self._weight is not None and on_gpu(self._weight):
            return linear(x, self._weight, self._bias, out)
        assert out is None, "a CPU's products choose their memory themselves"
        x = normed(x)
        if self._packed is not None and (self._weight is None or x.shape[0] > 1):
            return _linear_pointwise(x, self._packed, self._bias, "none", [], "")
        if self._transposed is not None:
            return torch.mm(x, self._transposed) if self._bias is None else \
                torch.addmm(self._bias, x, self._transposed)
        assert self._weight is not None
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def gated(self, x: Tensor | Stream) -> Tensor:
        """silu(gate) * up of the result's halves, for a matrix whose first half of rows is the gate's."""
        if self._weight is not None and on_gpu(self._weight):
            return gated_linear(x, self._weight, self._bias)
        return silu_mul(self(x))

    def add_to(self, residual: Tensor, x: Tensor, norm: RmsNorm | None = None) -> BegunNorm | None:
        """Adds x W^T + b to residual, in place. norm: the one that the sum goes through next; what of it was done on
        the way is returned."""
        if self._weight is not None and on_gpu(self._weight):
            return add_linear(residual, x, self._weight, self._bias, norm)
        residual += self(x)
        return None

    def _lay_out_for_cpu(self, weight: Tensor) -> None:
        """The new form replaces the old one, unless there is memory for both."""
        if weight.dtype == torch.float32 and weight.numel() <= _SMALL:
            self._transposed = weight.t().contiguous()
            self._weight = None
        else:
            self._packed = pack(weight)
            keep = weight.dtype == torch.float32 and _second_copies.take(weight.nbytes)
            if self._packed is not None and not keep:
                self._weight = None


class _Budget:
    """Bytes that a process may spend on something it could do without: an eighth of the machine's memory."""

    def __init__(self) -> None:
        self._left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8

    def take(self, size: int) -> bool:
        """Whether there was enough left."""
        enough = size <= self._left
        self._left -= size if enough else 0
        return enough


_second_copies = _Budget()


def _find_operator(name: str) -> Callable[..., Tensor] | None:
    try:
        return getattr(torch.ops.mkldnn, name)
    except (AttributeError, RuntimeError):
        return None


_reorder = _find_operator("_reorder_linear_weight")
_pointwise = _find_operator("_linear_pointwise")


def _linear_pointwise(*args: object) -> Tensor:
    assert _pointwise is not None
    return _pointwise(*args)


def pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout, or None where that cannot be had or does not give the plain product's result."""
    if _reorder is None or _pointwise is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        packed = _reorder(weight, _PACK_FOR_ROWS)
        probe = torch.ones(1, weight.shape[1], dtype=weight.dtype)
        got, expected = _pointwise(probe, packed, None, "none", [], ""), probe.float() @ weight.float().T
    except RuntimeError:
        return None
    bound = 0.02 * weight.float().abs().sum(1)
    return packed if bool(((got.float() - expected).abs() <= bound).all()) else None


def column_parallel(weights: Weights, parts: Sequence[tuple[str, int, range]], num_inputs: int, *,
                    bias: bool = False) -> Linear:
    """One product for several matrices, stacked; each part is (name, rows of the whole matrix, this rank's rows)."""
    weight = torch.cat([weights.get(f"{name}.weight", (total, num_inputs), rows=rows) for name, total, rows in parts])
    stacked_bias = torch.cat([weights.get(f"{name}.bias", (total,), rows=rows) for name, total, rows in parts]) \
        if bias else None
    return Linear(weight, stacked_bias)


class RowParallelLinear:
    """x W^T + b with the inputs spread over ranks, each of which adds its part to the residual stream."""

    def __init__(self, weights: Weights, name: str, num_outputs: int, num_inputs: int, columns: range,
                 parallel: Parallel, place: Place, *, bias: bool = False) -> None:
        weight = weights.get(f"{name}.weight", (num_outputs, num_inputs), columns=columns)
        # The bias must be added once, not once a rank.
        own_bias = weights.get(f"{name}.bias", (num_outputs,)) if bias else None
        self._linear = Linear(weight, own_bias if parallel.rank == 0 else None)
        self._parallel = parallel
        self._place = place

    def add_to(self, residual: Tensor, x: Tensor, norm: RmsNorm) -> Stream:
        """residual + x W^T + b, on its way through `norm`. x [T, in / size]; residual [T, out], the same on all ranks,
        may be written over."""
        if self._parallel.size == 1:
            return Stream(residual, norm, self._linear.add_to(residual, x, norm))
        part = self._parallel.part(self._place, len(residual))
        if part is not None:
            self._linear(x, part.mine)
            return part.sum(norm, residual)
        # The residual, like the bias, must be added once.
        summed = residual
        if self._parallel.rank == 0:
            self._linear.add_to(summed, x)
        else:
            summed = self._linear(x)
        return Stream(self._parallel.all_reduce(summed), norm)
