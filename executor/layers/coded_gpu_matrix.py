"""A matrix in 8 or 4 bits on a GPU, which multiplies with its codes."""

from __future__ import annotations

from torch import Tensor

from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm, Stream
from sidestep.kernels.ops.silu_mul import GateAndUp
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from sidestep.kernels.unfinished_product import Product


class CodedGpuMatrix:
    """A coded matrix on a GPU."""

    def __init__(self, matrix: CodedMatrix, bias: Tensor | None) -> None:
        """Repack the matrix. Raises EngineStartError for groups that no kernel reads."""
        try:
            self._matrix = DeviceMatrix.of(matrix)
        except ValueError as error:
            raise EngineStartError(f"model: {error}") from error
        self._bias = bias

    @property
    def kind(self) -> str:
        """The form of the codes."""
        return self._matrix.kind

    @property
    def codes(self) -> DeviceMatrix | None:
        """The matrix, if there is no bias."""
        return self._matrix if self._bias is None else None

    def __call__(self, x: Tensor | Stream, out: Tensor | None = None) -> Tensor:
        """Return the product."""
        from sidestep.kernels.products.coded_linear import coded_linear

        return coded_linear(x, self._matrix, self._bias, out)

    def unfinished(self, x: Tensor | Stream) -> Product:
        """Return the product, or what is left of it to the kernel that reads it next."""
        from sidestep.kernels.products.coded_linear import unfinished_coded_linear

        return unfinished_coded_linear(x, self._matrix, self._bias)

    def gated(self, x: Tensor | Stream) -> Tensor | GateAndUp:
        """Return silu(gate) * up of the halves of the product, or the halves."""
        from sidestep.kernels.products.coded_linear import coded_gated_linear

        return coded_gated_linear(x, self._matrix, self._bias)

    def add_to(self, residual: Tensor, x: Tensor | GateAndUp, norm: RmsNorm | None) -> Begun | None:
        """Add the product to residual, in place."""
        from sidestep.kernels.products.coded_linear import add_coded_linear

        begun = norm if norm is not None and norm.may_begin else None
        return add_coded_linear(residual, x, self._matrix, self._bias, begun)
