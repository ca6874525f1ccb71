"""The needs of GPUs before they can be used again, as NVML tells them; called through ctypes.

A process that used a GPU may have died of the GPU. Then a new process would die too, perhaps after
minutes, until an operator has reset the GPU or the machine. The driver knows (Xid 154 reports it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"""
_NEEDS = {
    1: "a reset",
    2: "a reboot of the machine",
    3: "an end of its peer-to-peer traffic, and perhaps more",
    4: "a reset, after its other programs have ended",
}
"""Values of the field; 0 is no need."""
_LOST = {15: "a reboot of the machine: it is lost", 16: "a reset"}
"""Errors of NVML that say the same: NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED."""


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t; `value` is a union of 8 bytes, whose first 4 hold an unsigned int."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("result", ctypes.c_int),
        ("value", ctypes.c_uint),
        ("rest", ctypes.c_uint),
    )


def load_nvml() -> Any:
    """Return NVML's library; None where there is none."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def what_gpus_need(gpus: Iterable[str], nvml: Any) -> str | None:
    """Return what must be done before these GPUs can be used again; None if nothing is known.

    gpus: indices or UUIDs. nvml: the library. A driver that does not know the field says nothing.
    """
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return None
    try:
        needs = {gpu: _need(gpu, nvml) for gpu in gpus}
    finally:
        nvml.nvmlShutdown()
    told = [f"GPU {gpu} needs {need}" for gpu, need in needs.items() if need is not None]
    return "; ".join(told) or None


def _need(gpu: str, nvml: Any) -> str | None:
    device = ctypes.c_void_p()
    if gpu.isdigit():
        error = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(gpu)), ctypes.byref(device))
    else:
        error = nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(device))
    if error:
        return _LOST.get(error)
    asked = FieldValue(field=_RECOVERY_ACTION)
    error = nvml.nvmlDeviceGetFieldValues(device, ctypes.c_int(1), ctypes.byref(asked))
    if error or asked.result:
        return _LOST.get(error or asked.result)
    action = int(asked.value)
    return _NEEDS.get(action, f"recovery action {action} of NVML") if action else None
