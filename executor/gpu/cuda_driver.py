"""Calls to the NVIDIA driver that are needed before torch is imported, made through ctypes.

They take a fraction of a second. ctypes releases the interpreter's lock during a call, so the
driver can work while another thread imports torch.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from sidestep.kernels.gpu import Gpu

_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76
"""CUdevice_attribute: multiprocessor count, and compute capability (major, minor)."""


def has_driver() -> bool:
    """Return whether this machine seems to have an NVIDIA driver.

    Only a device file is looked for, which costs nothing; the driver itself is not called.
    """
    return os.path.exists("/dev/nvidiactl")


def _open() -> Any:
    """Return the driver's library, initialised; None without a driver or a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


def find_gpu(index: int) -> Gpu | None:
    """Return a GPU that this process may use; None if there is none. Makes no context on it."""
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
    """Make the GPU's primary context, which torch then finds and uses.

    Without a GPU nothing happens; the code that needs the GPU reports the error.
    """
    cuda = _open()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda is not None and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
