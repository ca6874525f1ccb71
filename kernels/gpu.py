"""The GPU that a tensor is on, or stands for.

Kernels are launched for tensors on a GPU, and compiled for tensors that stand for such tensors (see
`stand_for`). This module does not import torch when it is imported, so that a process which only
needs the description of a GPU does not wait for torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True)
class Gpu:
    """GPU properties that a kernel is compiled for."""

    capability: int
    """Compute capability times ten: 90 for Hopper; 0 if the GPU is not an NVIDIA GPU."""
    processors: int
    """Number of streaming multiprocessors."""


_stand_ins: dict[str, Gpu] = {}
"""Stand-in GPUs by device type."""


def on_gpu(x: Tensor) -> bool:
    """Return whether the project's own kernels take this tensor."""
    return x.is_cuda or x.device.type in _stand_ins


@functools.cache
def gpu_of(on: device) -> Gpu | None:
    """Return the GPU that a device is or stands for, or None if there is none."""
    import torch

    if on.type != "cuda":
        return _stand_ins.get(on.type)
    found = torch.cuda.get_device_properties(on)
    return Gpu(
        10 * found.major + found.minor if torch.version.hip is None else 0,
        found.multi_processor_count,
    )


def is_hopper(on: device) -> bool:
    """Return whether a device is, or stands for, a Hopper GPU.

    Some kernels are written for its tensor cores and copy engine alone.
    """
    gpu = gpu_of(on)
    return gpu is not None and gpu.capability // 10 == 9


def stand_for(gpu: Gpu, device_type: str = "meta") -> None:
    """Let tensors on devices of this type stand for tensors on this GPU from now on.

    The GPU need not be present.
    """
    _stand_ins[device_type] = gpu
    gpu_of.cache_clear()


@contextmanager
def like_gpu(gpu: Gpu, device_type: str) -> Iterator[None]:
    """Let tensors on devices of this type stand for tensors on this GPU within the context.

    Layers that are built there keep their weights as they do on a GPU. No kernel may be launched.
    """
    before = _stand_ins.copy()
    stand_for(gpu, device_type)
    try:
        yield
    finally:
        _stand_ins.clear()
        _stand_ins.update(before)
        gpu_of.cache_clear()
