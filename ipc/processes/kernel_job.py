"""The arguments of the process that compiles kernels for a GPU that need not be in the machine."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.config import EngineConfig

KERNEL_COMPILER = "sidestep.executor.processes.offline_kernels:main"
"""Target of the process, for `spawn`."""
PROCESSORS = {80: 108, 89: 142, 90: 132, 100: 148}
"""Compute capability times ten -> streaming multiprocessors of the GPU that servers mostly have.

These are A100, L40S, H100 and H200, and B200."""


@dataclass(frozen=True)
class KernelJob:
    """Engine and GPU that kernels are compiled for; sent to the process as JSON."""

    config: EngineConfig
    capability: int
    """Compute capability times ten: 90 for Hopper."""
    processors: int
    """Number of streaming multiprocessors."""
    num_processes: int
    """Number of kernels that are compiled at a time."""
