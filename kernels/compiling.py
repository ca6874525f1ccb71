"""Compiling what launches need, without running anything.

Triton compiles a kernel when it is first launched with arguments of new kinds, and for some of its
versions a C compiler then makes the function that launches it. Here both are done ahead: by threads
beside each other, or, since most of a compilation holds the interpreter's lock, by processes
(executor/gpu/kernel_compiler.py), whose results lie in Triton's cache for whoever launches the same
kernel.
"""

from __future__ import annotations

import fcntl
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from sidestep.kernels.gpu import Gpu, stand_for

_knowing = threading.Lock()

Compilation = Callable[[], Any]
"""Compiles a kernel, or finds it in Triton's cache, and returns it."""


@contextmanager
def compiling_only(compiler: Executor) -> Iterator[None]:
    """Within it a launch of a Triton kernel runs nothing, but what it needs is given to `compiler`;
    at its end all is done. For this thread's launches, while no other thread has any.
    """
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    know_triton()
    JITFunction.run = compile_only
    try:
        with triton.AsyncCompileMode(compiler):
            yield
    finally:
        JITFunction.run = run


class CompilerThreads(ThreadPoolExecutor):
    """Compiles in threads."""

    def submit(self, compilation: Compilation, /, *_: Any, **__: Any) -> Future[Any]:
        return super().submit(lambda: with_launcher(compilation()))


def with_launcher(kernel: Any) -> Any:
    """The kernel, once the function that launches it is made too."""
    if hasattr(nvidia, "make_launcher"):  # others have one function for all kernels
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


class Locks:
    """Keeps processes that were forked after it was made from making the same launcher at the same
    time.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("launchers")

    def with_launcher(self, kernel: Any) -> Any:
        """As `with_launcher`. A launcher depends on the types of a kernel's arguments alone."""
        place = zlib.crc32(repr(list(kernel.src.signature.values())).encode())
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            return with_launcher(kernel)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)


class _Driver:
    """What Triton asks of a driver before it launches."""

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
    """From now on launches within `compiling_only`, with tensors on such a device, are for this
    GPU.
    """
    stand_for(gpu, device_type)
    triton.runtime.driver.set_active(_Driver(gpu))


def know_triton() -> None:
    """What Triton does once in a process before it looks into its cache: it reads all of its own
    code, hundreds of megabytes. Most of that leaves the interpreter's lock alone, so it can be done
    in a thread, ahead.
    """
    with _knowing:
        triton_key()
