"""Launches of known kinds: the kernel that Triton would choose, with the same arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from sidestep.kernels import quick_launch
from sidestep.kernels.quick_launch import Form, form_of, kept_descriptors, quick

MEMORY = torch.zeros(1 << 16, dtype=torch.uint8)


def _kernel(  # type: ignore[no-untyped-def]
    x, bias, tiles, T, N, stride, scale, flag, K: tl.constexpr, KIND: tl.constexpr = 3
):  # fmt: skip
    pass


KERNEL = JITFunction(_kernel, do_not_specialize=["T"])
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


def pointer(rng: random.Random) -> Tensor:
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.int8])
    first = rng.choice([0, 16, 64, 4, 8])
    return MEMORY[first : first + 64].view(dtype)


def descriptor(rng: random.Random) -> Any:
    dtype = rng.choice([torch.bfloat16, torch.float16])
    base = MEMORY[: rng.choice([4096, 8192])].view(dtype).view(-1, 64)
    block = rng.choice([[8, 64], [16, 64], [32, 64]])
    if rng.random() < 0.5:
        return TensorDescriptor(base, list(base.shape), [64, 1], block)
    layout = gl.NVMMASharedLayout(rng.choice([64, 128]), 16, 2)
    return GluonDescriptor(base, list(base.shape), [64, 1], block, layout)


def arguments(rng: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    numbers = [1, 2, 15, 16, 17, 4096, 2**31 - 1, 2**31, 2**40, -16, -(2**31) - 1]
    values = {
        "x": pointer(rng),
        "bias": rng.choice([None, pointer(rng)]),
        "tiles": rng.choice([None, descriptor(rng)]),
        "T": rng.choice(numbers),
        "N": rng.choice(numbers),
        "stride": rng.choice([*numbers, None]),
        "scale": rng.choice([1.0, 0.5, 1]),
        "flag": rng.choice([True, False]),
        "K": rng.choice([1, True, 128, None, tl.float32]),
    }
    if rng.random() < 0.5:
        values["KIND"] = rng.choice([3, 4])
    cut = rng.randint(1, len(values))
    names = list(values)
    options = {"num_warps": rng.choice([4, 8])} if rng.random() < 0.5 else {}
    return tuple(values.values())[:cut], {n: values[n] for n in names[cut:]} | options


def test_launches_with_one_key_have_one_compiled_kernel() -> None:
    """Compare with what Triton looks its compiled kernels up by."""
    bind = create_function_from_signature(KERNEL.signature, KERNEL.params, BACKEND)
    rng = random.Random(0)
    forms: dict[tuple[Any, ...], Form | None] = {}
    found: dict[tuple[Any, ...], str] = {}
    kinds = set()
    for _ in range(4000):
        args, kwargs = arguments(rng)
        values = (*args, *kwargs.values())
        kind = (len(args), *kwargs, *map(type, values))
        if kind not in forms:
            forms[kind] = form_of(KERNEL, args, kwargs)
        form = forms[kind]
        assert form is not None
        key, given = form.bind(values)
        bound, specialization, options = bind(*args, **kwargs)
        wanted = str((specialization, options))
        assert found.setdefault((kind, key), wanted) == wanted
        kinds.add(wanted)
        assert given == tuple(
            one.data_ptr() if isinstance(one, Tensor) else one for one in bound.values()
        )
    assert len(kinds) > 1000


class Recorder:
    """Stands for Triton's way, and for the kernel that it compiles."""

    def __init__(self) -> None:
        self.slow: list[tuple[Any, ...]] = []
        self.quick: list[tuple[Any, ...]] = []

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        self.slow.append((grid, args, kwargs))
        made = CompiledKernel.__new__(CompiledKernel)
        made.__dict__.update(function="function", packed_metadata="packed", module=None)
        made._run = lambda *given: self.quick.append(given)
        return made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    return Recorder()


@pytest.fixture
def launch(recorder: Recorder) -> Callable[..., Any]:
    kernel = JITFunction(_kernel, do_not_specialize=["T"])
    run = quick(recorder.run)

    def launched(grid: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    return launched


def test_a_second_launch_goes_straight_to_the_compiled_kernel(
    launch: Callable[..., Any], recorder: Recorder
) -> None:
    x = MEMORY[:64]
    first = launch((5,), x, None, None, 3, 4, 5, 0.5, True, K=8, num_warps=4)
    assert len(recorder.slow) == 1 and not recorder.quick
    other = MEMORY[64:128]
    assert launch((6, 2), other, None, None, 9, 4, 5, 0.25, True, K=8, num_warps=4)
    assert len(recorder.slow) == 1 and first is not None
    given = (other.data_ptr(), None, None, 9, 4, 5, 0.25, True, 8, 3)
    assert recorder.quick == [(6, 2, 1, 77, "function", "packed", None, None, None, *given)]


@pytest.mark.parametrize(
    "change",
    [
        {"x": MEMORY[4:68]},
        {"N": 16},
        {"N": 1},
        {"N": 2**31},
        {"K": 9},
        {"flag": False},
        {"num_warps": 8},
        {"x": MEMORY[:64].view(torch.int16)},
    ],
    ids=str,
)
def test_other_kinds_are_found_by_triton(
    change: dict[str, Any], launch: Callable[..., Any], recorder: Recorder
) -> None:
    values: dict[str, Any] = {
        "x": MEMORY[:64], "bias": None, "tiles": None, "T": 3, "N": 4, "stride": 5, "scale": 0.5,
        "flag": True, "K": 8, "num_warps": 4,
    }  # fmt: skip
    launch((1,), **values)
    launch((1,), **(values | change))
    assert len(recorder.slow) == 2
    launch((1,), **values)
    launch((1,), **(values | change))
    assert len(recorder.slow) == 2 and len(recorder.quick) == 2


def test_unusual_launches_are_tritons(launch: Callable[..., Any], recorder: Recorder) -> None:
    values = (MEMORY[:64], None, None, 3, 4, 5, 0.5, True, 8)
    for _ in range(2):
        launch(lambda meta: (1,), *values)
        launch((1,), *values, warmup=True)
        launch((1,), *values[:-1], (1, 2))
        launch((1,), object(), *values[1:])
    assert len(recorder.slow) == 8 and not recorder.quick


def test_descriptors_are_made_once_for_a_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(tiles: Any, metadata: Any, *others: Any) -> list[Any]:
        made.append(tiles)
        return [len(made), *tiles.shape, *tiles.strides]

    kept, metadata = kept_descriptors(make), {"swizzle": 3}

    def tiles(first: int, rows: int) -> Any:
        base = MEMORY[first : first + 64 * rows].view(rows, 64)
        return TensorDescriptor(base, [rows, 64], [64, 1], [8, 64])

    assert kept(tiles(0, 16), metadata) == [1, 16, 64, 64, 1]
    assert kept(tiles(0, 16), metadata) == [1, 16, 64, 64, 1]
    for other in (tiles(64, 16), tiles(0, 32)):
        assert kept(other, metadata)[0] == kept(other, metadata)[0] == len(made)
    assert len(made) == 3
    kept(tiles(0, 16), {"swizzle": 2})
    kept(tiles(0, 16), None)
    kept(tiles(0, 16), None)
    rounded = SimpleNamespace(**{**vars(tiles(0, 16)), "round_f32_to_tf32": True})
    kept(rounded, metadata)
    assert len(made) == 7
    monkeypatch.setattr(quick_launch, "_MOST_DESCRIPTORS", 4)
    kept(tiles(128, 16), metadata)
    kept(tiles(0, 16), metadata)
    assert len(made) == 9, "all are forgotten when there are too many"
