"""Which GPU a tensor is on, or stands for.

Kernels are launched for tensors on a GPU, and compiled for tensors that stand for such (see
`stand_for`). No torch at import: who only wants to know what a GPU is need not wait for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, device


@dataclass(frozen=True)
class Gpu:
    """What a kernel is compiled for."""

    capability: int
    """Compute capability, ten times: 90 for Hopper; 0 if it is not of NVIDIA."""
    processors: int
    """Streaming multiprocessors."""


_stand_ins: dict[str, Gpu] = {}
"""By type of device."""


def on_gpu(x: Tensor) -> bool:
    """Whether our own kernels take this tensor."""
    return x.is_cuda or x.device.type in _stand_ins


@functools.cache
def gpu_of(on: device) -> Gpu | None:
    """None for what is no GPU and stands for none."""
    import torch

    if on.type != "cuda":
        return _stand_ins.get(on.type)
    found = torch.cuda.get_device_properties(on)
    return Gpu(
        10 * found.major + found.minor if torch.version.hip is None else 0,
        found.multi_processor_count,
    )


def stand_for(gpu: Gpu, device_type: str = "meta") -> None:
    """From now on tensors on such a device stand for tensors on this GPU, which need not be
    there.
    """
    _stand_ins[device_type] = gpu
    gpu_of.cache_clear()
