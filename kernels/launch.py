"""Launch options of kernels: programmatic dependent launch (PDL) where the GPU has it.

With PDL (Hopper and later) a kernel's blocks may start while the kernel before it still runs. Every
kernel here, in Triton or in CUDA C++, keeps these rules, so that PDL changes no result:

- `gdc_wait` comes before the first access to memory that another kernel wrote or still reads.
  Weights, which no kernel writes, may be loaded before it.
- A kernel *opens* when it lets the next one start (`gdc_launch_dependents`). Most open after their
  wait. So when the next one starts, all kernels but the one that has opened have ended.
- Some kernels open before their wait (`@opens_early`): many of few rows, the one before decode
  attention of many rows, and those that choose experts and sort pairs. The kernel after such a one
  may start while several others still run, and its weights, or keys of earlier steps, load as soon
  as there is room for them. When its own wait ends, all kernels before it have ended all the same,
  since each of them has waited.
- Therefore a kernel may also read a step's tables before its wait, but only if a kernel that opens
  after its own wait lies between it and the kernel that completes them. The first kernels of a step
  complete its tables (kernels/triton/prepare_step_triton.py and `plan_attention`).

Kernels name the tables of the last rule with the decorators of kernels/launch_order.py. It follows
launches while a step is compiled or warmed up, and raises where the rule is broken. Kernels in CUDA
C++ are not counted, which makes the check stricter. They name what they read early
(`check_early_reads`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from sidestep.kernels.gpu import gpu_of


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Return whether kernels on this device may be launched with programmatic dependent launch."""
    gpu = gpu_of(device)
    return gpu is not None and gpu.capability >= 90


_OFF: dict[str, bool] = {"PDL": False}
_ON: dict[str, bool] = {"PDL": True, "launch_pdl": True}


def pdl(x: Tensor) -> dict[str, bool]:
    """Return the keyword arguments of a launch on x's device that switch PDL on or off.

    They are the kernel's own PDL flag and, where PDL is on, the launcher's.
    """
    return _ON if has_pdl(x.device) else _OFF


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors, or 2 if kernels are interpreted on a CPU."""
    gpu = gpu_of(device)
    return gpu.processors if gpu is not None else 2


_parts: list[int] = []


@contextlib.contextmanager
def on_processors(count: int) -> Iterator[None]:
    """Within the context, products are launched for this many of a device's processors."""
    _parts.append(count)
    try:
        yield
    finally:
        _parts.pop()


def free_processors(device: torch.device) -> int:
    """Return the number of processors that a product has; see on_processors."""
    return _parts[-1] if _parts else num_processors(device)


def cdiv(amount: int, size: int) -> int:
    """Return the number of parts of a size that hold an amount.

    Triton's own function, which kernels may call too, takes the host some microseconds.
    """
    return -(-amount // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least a number."""
    return 1 << max(0, number - 1).bit_length()
