"""How kernels are launched: programmatic dependent launch where the GPU has it.

With it (Hopper and later) a kernel's blocks may start while the kernel before it still runs. The rules that every
Triton kernel here keeps, so that this changes no result:

- `gdc_wait` comes before the first access to what another kernel wrote or still reads; weights, which nothing writes,
  may be loaded before it;
- `gdc_launch_dependents` comes after `gdc_wait`. So when a kernel starts, all kernels but the one just before it have
  ended, and what they wrote (a step's tables, say) may be read before the wait too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


@functools.cache
def has_pdl(device: torch.device) -> bool:
    """Whether kernels on this device may be launched programmatically dependent."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


_OFF: dict[str, bool] = {"PDL": False}
_ON: dict[str, bool] = {"PDL": True, "launch_pdl": True}


def pdl(x: Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch on x's device: the kernel's own PDL flag, and the launcher's."""
    return _ON if has_pdl(x.device) else _OFF


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; a small number where there is no GPU and kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@contextmanager
def compiling_only(num_threads: int) -> Iterator[None]:
    """Within it a launch of a Triton kernel runs nothing, but what it needs is compiled, beside others; at its end all
    is. For this thread's launches, while no other thread has any."""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(num_threads) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = run
