"""Launches of kernels in CUDA C++."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_holds: list[None] = []
"""One for each context in which kernels are only compiled."""


class Kernel:
    """A kernel on the GPUs of this process."""

    def __init__(self, code: bytes, name: str, *, threads: int, shared: int) -> None:
        """Take a kernel's machine code. shared: bytes of memory of a block, given at the launch."""
        self._code, self._name = code, name
        self._threads, self._shared = threads, shared
        self._functions: dict[int, Any] = {}

    def launch(self, blocks: int, arguments: Sequence[Any]) -> None:
        """Launch the kernel on the current stream, by the rules of kernels/launch.py.

        arguments: ctypes objects.
        """
        from cuda.bindings import driver

        device = torch.cuda.current_device()
        function = self._functions.get(device)
        if function is None:
            function = self._functions[device] = self._loaded()
        places = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes = self._shared
        config.hStream = torch._C._cuda_getCurrentRawStream(device)
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
        _check(*driver.cuLaunchKernelEx(config, function, ctypes.addressof(places), 0))

    def _loaded(self) -> Any:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes the context
        error, module = driver.cuModuleLoadData(self._code)
        _check(error)
        error, function = driver.cuModuleGetFunction(module, self._name.encode())
        _check(error)
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(*driver.cuFuncSetAttribute(function, most, self._shared))
        return function


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Launch no kernel within the context, while no other thread launches one."""
    _holds.append(None)
    try:
        yield
    finally:
        _holds.pop()


def launches(x: Tensor) -> bool:
    """Return whether kernels run on x's device now, rather than being compiled."""
    return x.is_cuda and not _holds


def runs_or_compiles(x: Tensor) -> bool:
    """Return whether kernels run on x's device, or are only compiled: not for Triton's interpreter.

    While they are compiled, tensors of any device may stand for those on a GPU.
    """
    return x.is_cuda or x.is_meta or bool(_holds)


def _check(error: object, *_: object) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"a launch in CUDA C++: {error}")
