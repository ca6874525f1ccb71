"""The little that is asked of the NVIDIA driver before torch is there to ask: by ctypes, in a
fraction of a second.

A call leaves the interpreter's lock alone, so what the driver needs time for can be done beside the
import of torch.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from sidestep.kernels.gpu import Gpu

_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""CUdevice_attribute: multiprocessor count, compute capability."""


def has_driver() -> bool:
    """Whether this machine has, as far as can be seen without asking it, an NVIDIA driver: at no
    cost.
    """
    return os.path.exists("/dev/nvidiactl")


def _open() -> Any:
    """The driver's library, begun; None without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


def find_gpu(index: int) -> Gpu | None:
    """A GPU that this process may use, without a context on it; None if there is none."""
    cuda = _open()
    device = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return Gpu(10 * attribute(_MAJOR) + attribute(_MINOR), attribute(_PROCESSORS))


def begin_context(index: int) -> None:
    """Makes the GPU's primary context, which torch then finds and uses. Without a GPU nothing
    happens: whoever needs it will say so.
    """
    cuda = _open()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda is not None and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
