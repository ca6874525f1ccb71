"""The product behind the experts of a layer, which their kernel may compute for one row."""

from __future__ import annotations

from typing import NamedTuple

from sidestep.kernels.quantized.device_matrix import DeviceMatrix


class ProductBehind(NamedTuple):
    """The product of the norm of the stream, which nothing else needs, and a coded matrix.

    It has no bias.
    """

    matrix: DeviceMatrix
    crowded: bool
    """Whether the kernel that reads the product has many programs. Where they find no room before
    the product ends, they crowd on the first processors that are free, unless all start then."""
