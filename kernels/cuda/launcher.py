"""Launches of kernels in CUDA C++, and the descriptors of tiles that they take."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_BYTES = 128
"""Bytes of a descriptor, which lies at a multiple of 64."""
_L2_256, _PLAIN, _SWIZZLE_128 = 3, 0, 3
"""CUtensorMapL2promotion and CUtensorMapSwizzle of the driver."""
_KINDS = {torch.uint8: 0, torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType of the driver."""
_holds: list[None] = []
"""One for each context in which kernels are only compiled."""


class Kernel:
    """A kernel on the GPUs of this process."""

    def __init__(self, code: bytes, name: str, *, threads: int, shared: int) -> None:
        """Take a kernel's machine code. shared: bytes of memory of a block, given at the launch."""
        self._code, self._name = code, name
        self._threads, self._shared = threads, shared
        self._functions: dict[int, Any] = {}

    def launch(self, blocks: int, arguments: Sequence[Any], *, early: bool) -> None:
        """Launch the kernel on the current stream.

        arguments: ctypes objects, and those of `TileMap`. early: whether it may start before the
        kernel before it ends.
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
        if early:
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


class TileMap(ctypes.Structure):
    """A descriptor of tiles. Its memory is aligned by `tile_map`."""

    _fields_ = (("words", ctypes.c_uint64 * (_BYTES // 8)),)


@functools.lru_cache(maxsize=1 << 14)
def _made(
    address: int,
    kind: int,
    item: int,
    rows: int,
    columns: int,
    stride: int,
    tile_rows: int,
    tile_columns: int,
    swizzle: int,
) -> TileMap:
    memory = (ctypes.c_ubyte * (_BYTES + 64))()
    made = TileMap.from_buffer(memory, -ctypes.addressof(memory) % 64)
    error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.byref(made),
        kind,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(stride * item),
        (ctypes.c_uint32 * 2)(tile_columns, tile_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        swizzle,
        _L2_256,
        0,
    )
    if error:
        raise RuntimeError(f"the driver makes no descriptor of tiles: error {error}")
    return made


def tile_map(x: Tensor, rows: int, row_bytes: int) -> TileMap:
    """Return the descriptor of tiles of x [T, K], whose rows may lie apart.

    Tiles lie in shared memory in the pattern for 128 bytes a row, or row after row if these are
    shorter; what is outside x is zero.
    """
    kind, item = _KINDS[x.dtype], x.itemsize
    sizes = x.shape[0], x.shape[1], x.stride(0)
    swizzle = _SWIZZLE_128 if row_bytes == 128 else _PLAIN
    return _made(x.data_ptr(), kind, item, *sizes, rows, row_bytes // item, swizzle)


def _check(error: object, *_: object) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"a launch in CUDA C++: {error}")
