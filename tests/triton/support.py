"""Helpers of the kernel tests: the device, poisoned memory, seeded values, tolerances.

With a GPU the kernels are compiled and run there; without one they run in Triton's interpreter. The
interpreter is right for float32 and float16 alone: bfloat16 is silently wrong in it, so that is
tested on a GPU only. Poisoned memory lies between guarded margins.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes import PYTHON_PATH, ROOT

LIMIT_S = 600
"""Seconds for a test. To compile or interpret kernels takes a minute, and several under load."""
INTERPRETED = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
"""Types for tests that do not depend on the type: on a GPU each type is another compilation."""
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
needs_hopper = pytest.mark.skipif(
    INTERPRETED or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)

_MARGIN = 1024
"""Number of elements of a margin: as many as kernels write at a time.

A write without its mask then fails a test and does not end the whole run.
"""
# Each tensor has a poison of its own, different from the NaN that arithmetic makes. NaN that is
# read behind one tensor and stored behind another keeps its bits, and would otherwise pass for the
# original contents.
_POISON = {
    torch.float32: (0x7FC0BAD1, 2**16),
    torch.float16: (0x7E01, 500),
    torch.bfloat16: (0x7FC1, 60),
    torch.uint8: (101, 64),
    torch.int8: (37, 32),
    torch.float8_e4m3fn: (0x7F, 1),
    torch.int32: (-1234567, 2**16),
    torch.int64: (-123456789012345, 2**16),
}
"""The first poison, as bits, and the number of poisons."""
_poisons = itertools.count()
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNINITIALISED = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
)


def skip_overflow_checks() -> None:
    """Skip the interpreter's overflow checks.

    It would do each integer operation twice, for an assertion that never fires in it.
    """
    from triton.runtime.interpreter import interpreter_builder

    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, sanitize_overflow=False
    )


def run_interpreted(module: str, *words: str) -> str:
    """Run a program of tests/triton in a process of its own, and return its output."""
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": PYTHON_PATH,
    }
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 10,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class Values:
    """Seeded values, the same on every device."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * scale).to(DEVICE, dtype)

    def integers(self, low: int, high: int, count: int) -> list[int]:
        """Return integers from low to high - 1."""
        return torch.randint(low, high, (count,), generator=self._generator).tolist()

    def different(self, count: int, below: int) -> list[int]:
        """Return `count` different integers of 0 .. below - 1, in any order."""
        return torch.randperm(below, generator=self._generator)[:count].tolist()


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bits(x: Tensor) -> Tensor:
    """Return the same memory as integers, in which NaN equals itself."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device = DEVICE) -> Tensor:
    """Return a contiguous tensor of poison with margins of poison.

    Its elements, and those before and behind it, are NaN, or an odd integer.
    """
    size = torch.Size(shape).numel()
    buffer = torch.zeros(size + 2 * _MARGIN, dtype=dtype, device=device)
    first, different = _POISON[dtype]
    # Integers of different poisons are two apart and so stay odd.
    step = 1 if dtype.is_floating_point else 2
    buffer.view(_INTEGERS[dtype.itemsize]).fill_(first + next(_poisons) % different * step)
    return buffer[_MARGIN : _MARGIN + size].view(shape)


def guarded(x: Tensor) -> Tensor:
    """Return a copy of x between poisoned margins."""
    return poisoned(*x.shape, dtype=x.dtype).copy_(x)


class _Bytes:
    """Memory of the device, as numba's interface of arrays describes it."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def where_memory_ends(x: Tensor) -> Tensor:
    """Return a copy of x behind which the GPU has no memory: whoever reads there fails.

    It is never freed.
    """
    from cuda.bindings import driver

    def made(result: Any) -> Any:
        error, *values = result
        assert int(error) == 0, error
        return values[0] if values else None

    kind = driver.CUmemAllocationProp()
    kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kind.location.id = torch.cuda.current_device()
    access = driver.CUmemAccessDesc()
    access.location = kind.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    whole = made(driver.cuMemGetAllocationGranularity(kind, least))
    size = -(-x.nbytes // whole) * whole
    begin = made(driver.cuMemAddressReserve(size + whole, 0, 0, 0))
    made(driver.cuMemMap(begin, size, 0, made(driver.cuMemCreate(size, kind, 0)), 0))
    made(driver.cuMemSetAccess(begin, size, [access], 1))
    assert x.nbytes % 16 == 0, "the copy would not be aligned"
    memory = torch.as_tensor(_Bytes(int(begin) + size - x.nbytes, x.nbytes), device=x.device)
    return memory.view(x.dtype).view(x.shape).copy_(x)


def _whole(x: Tensor) -> Tensor:
    """Return x with its margins, as bits."""
    kind = _INTEGERS[x.element_size()]
    return torch.empty(0, dtype=kind, device=x.device).set_(x.untyped_storage())


def assert_untouched(x: Tensor, what: str) -> None:
    """Check that all of x, a part of a tensor from `poisoned`, is still poison."""
    assert bool((bits(x) == _whole(x)[0]).all()), f"wrote to {what}"


def assert_margins_untouched(*tensors: Tensor) -> None:
    """Check the margins of tensors from `poisoned` and `guarded`.

    Views that begin and end with such a tensor are possible too.
    """
    for x in tensors:
        whole = _whole(x)
        poison, first = int(whole[0]), _POISON[x.dtype][0]
        assert abs(poison - first) <= 2 * _POISON[x.dtype][1], "no poison before it"
        assert bool((whole[:_MARGIN] == poison).all()), (
            f"wrote before a tensor of shape {tuple(x.shape)}"
        )
        assert bool((whole[-_MARGIN:] == poison).all()), (
            f"wrote behind a tensor of shape {tuple(x.shape)}"
        )


@contextmanager
def unchanged(**tensors: Tensor) -> Iterator[None]:
    """Check that none of these tensors is written to."""
    before = {name: x.clone() for name, x in tensors.items()}
    yield
    for name, x in tensors.items():
        assert same(x, before[name]), f"wrote to {name}"


class PoisonedAllocations(TorchDispatchMode):
    """A mode in which uninitialised tensors come poisoned and between margins.

    The margins are checked on leaving.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _UNINITIALISED and result.numel():
            result = poisoned(*result.shape, dtype=result.dtype, device=result.device)
            self.given.append(result)
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's
        if error[0] is None:
            assert_margins_untouched(*self.given)


def assert_close(actual: Tensor, exact: Tensor, ulps: float = 4, float32_ulps: float = 16) -> None:
    """Compare actual with a result in float64, in units of actual's precision.

    The unit is that at actual's size, or at 1 if it is smaller. float32 has a larger tolerance:
    there the order of a long sum shows, while in 16 bits only the last rounding does.
    """
    assert exact.dtype == torch.float64
    tolerance = torch.finfo(actual.dtype).eps * (
        float32_ulps if actual.dtype == torch.float32 else ulps
    )
    torch.testing.assert_close(actual.double(), exact, rtol=tolerance, atol=tolerance)
