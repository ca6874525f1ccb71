"""Copies of small arrays between host and device that do not wait for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it may share the array's memory.

    A copy from memory that is not pinned would wait until the device has done everything that was
    queued before.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, complete when the device has done what was queued before."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
        tensor, non_blocking=True
    )
