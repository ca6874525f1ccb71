"""Compilation of the kernels that launches need, without running them.

Triton compiles a kernel when it is first launched with arguments of new kinds. For some versions of
Triton a C compiler then builds the launcher, the function that launches the kernel. This module
does both ahead of time. Threads can compile side by side, but most of a compilation holds the
interpreter's lock, so processes can do it too (executor/processes/kernel_compiler.py). Their
results lie in Triton's cache for every process that launches the same kernel.
"""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from sidestep.kernels.cuda import launcher
from sidestep.kernels.gpu import Gpu, stand_for
from sidestep.kernels.quick_launch import form_of
from sidestep.kernels.triton_key import compute_key

Compilation = Callable[[], Any]
"""Function that compiles a kernel, or finds it in Triton's cache, and returns it.

A kernel in CUDA C++ is the path of its file there.
"""


@contextmanager
def compiling_only(compiler: Executor) -> Iterator[None]:
    """Compile the kernels launched inside this context with `compiler`, and run none of them.

    All compilations are done when the context ends. It applies to launches by this thread, and no
    other thread may launch a kernel meanwhile.
    """
    run = JITFunction.run
    given: dict[tuple[Any, ...], Any] = {}
    """The results of launches, by the kernel and what it is compiled for."""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        form = form_of(self, args, kwargs) if type(grid) is tuple else None
        if form is None:
            return run(self, *args, grid=grid, warmup=True, **kwargs)
        kind = (id(self), *form.bind((*args, *kwargs.values()))[0])
        if kind not in given:
            given[kind] = run(self, *args, grid=grid, warmup=True, **kwargs)
        return given[kind]

    compute_key()
    JITFunction.run = compile_only
    try:
        with triton.AsyncCompileMode(compiler), launcher.compiling_only(compiler):
            yield
    finally:
        JITFunction.run = run


class CompilerThreads(ThreadPoolExecutor):
    """Executor that compiles kernels in threads."""

    def submit(self, compilation: Compilation, /, *_: Any, **__: Any) -> Future[Any]:
        """Compile a kernel and its launcher in one of the threads."""
        return super().submit(lambda: with_launcher(compilation()))


def with_launcher(kernel: Any) -> Any:
    """Return the kernel after building its launcher too, unless it is a file in CUDA C++.

    Some versions of Triton have one launcher for all kernels. Others link it to the driver's
    library: where there is none, as in the build of an image, the first start builds it.
    """
    if not isinstance(kernel, Path) and hasattr(nvidia, "make_launcher") and _finds_driver():
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


@functools.cache
def _finds_driver() -> bool:
    """Return whether Triton finds the library of the GPU's driver."""
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.SubprocessError):
        return False
    return True


class Locks:
    """File locks that keep forked processes from building the same launcher at the same time.

    The processes must be forked after this object was made.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("launchers")

    def with_launcher(self, kernel: Any) -> Any:
        """Build a kernel's launcher as the function `with_launcher` does, under a lock.

        A launcher depends on the types of the kernel's arguments alone, so their hash selects the
        byte that is locked.
        """
        byte = zlib.crc32(repr(list(kernel.src.signature.values())).encode())
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, byte)
        try:
            return with_launcher(kernel)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


class _Driver:
    """Stand-in for Triton's driver that answers what Triton asks before a launch."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", gpu.capability, 32)
        self.launcher_cls = nvidia.CudaLauncher

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_for(gpu: Gpu, device_type: str = "meta") -> None:
    """Compile later launches within `compiling_only` for this GPU.

    This applies to launches with tensors on a device of type `device_type`.
    """
    stand_for(gpu, device_type)
    triton.runtime.driver.set_active(_Driver(gpu))
