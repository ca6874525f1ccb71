"""Launches of kernels in CUDA C++."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

FormT = TypeVar("FormT", bound=Hashable)


class _Hold:
    """A context in which kernels are only compiled."""

    def __init__(self, compiler: Executor) -> None:
        self.compiler = compiler
        self.compilations: dict[Hashable, Future[Path]] = {}


_holds: list[_Hold] = []


class Kernel:
    """A kernel on the GPUs of this process."""

    def __init__(self, file: Path, name: str, *, threads: int, shared: int) -> None:
        """Take the file of a kernel's machine code.

        shared: bytes of memory of a block, given at the launch.
        """
        self._file, self._name = file, name
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
        error, module = driver.cuModuleLoadData(self._file.read_bytes())
        _check(error)
        error, function = driver.cuModuleGetFunction(module, self._name.encode())
        _check(error)
        attribute = driver.CUfunction_attribute
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(*driver.cuFuncSetAttribute(function, most, self._shared))
        # All of a processor's memory is shared memory, so that several blocks have room.
        share = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check(*driver.cuFuncSetAttribute(function, share, 100))
        return function


class Kernels(Generic[FormT]):
    """The forms of a kernel, each compiled when it is first needed."""

    def __init__(
        self, compiled: Callable[[FormT], Path], kernel: Callable[[Path, FormT], Kernel]
    ) -> None:
        """Take the functions that compile a form and that load it from its file."""
        self._compiled, self._kernel = compiled, kernel
        self._loaded: dict[FormT, Kernel] = {}

    def to_launch(self, form: FormT, x: Tensor) -> Kernel | None:
        """Return the kernel, or None where kernels are only compiled, or x is on no GPU."""
        if _holds:
            hold, compilation = _holds[-1], functools.partial(self._compiled, form)
            if (self, form) not in hold.compilations:
                hold.compilations[self, form] = hold.compiler.submit(compilation)
            return None
        if not x.is_cuda:
            self._compiled(form)
            return None
        if form not in self._loaded:
            self._loaded[form] = self._kernel(self._compiled(form), form)
        return self._loaded[form]


@contextlib.contextmanager
def compiling_only(compiler: Executor) -> Iterator[None]:
    """Compile the kernels launched inside this context with `compiler`, and run none of them.

    All compilations are done when the context ends, or as far as the futures of `compiler` are. No
    other thread may launch a kernel meanwhile.
    """
    _holds.append(_Hold(compiler))
    try:
        yield
    finally:
        hold = _holds.pop()
    for compilation in hold.compilations.values():
        compilation.result()


def runs_or_compiles(x: Tensor) -> bool:
    """Return whether kernels run on x's device, or are only compiled: not for Triton's interpreter.

    While they are compiled, tensors of any device may stand for those on a GPU.
    """
    return x.is_cuda or x.is_meta or bool(_holds)


def _check(error: object, *_: object) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"a launch in CUDA C++: {error}")
