"""Launches of kernels with arguments of kinds that were launched before.

Triton looks at every argument of a launch anew to find the compiled kernel, which takes the host
some 30 us, and it makes each descriptor of the copy engine anew. Steps with many prompt tokens are
launched kernel by kernel, and those of a small model wait for this. So what was found is kept: the
compiled kernel by the types of the arguments, the values that it was compiled for, and what Triton
tells numbers and pointers apart by; descriptors by the memory that they describe.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

_MOST_DESCRIPTORS = 1 << 14
"""Descriptors that are kept; then all are forgotten."""
_VALUES = (bool, int, float, str, type(None))
_FORMS = "quick_launch_forms"
"""Attribute of a kernel for its forms."""
Bind = Callable[[tuple[Any, ...]], tuple[tuple[Any, ...], tuple[Any, ...]]]
"""Returns, from the values of a launch, the key of the compiled kernel and its arguments."""


class Form(NamedTuple):
    """Launches of a kernel whose arguments have the same types."""

    bind: Bind
    compiled: dict[tuple[Any, ...], Any]
    """Compiled kernels by their keys."""


def launch_quickly() -> None:
    """Let all launches of this process go this way from now on."""
    if getattr(JITFunction.run, "is_quick", False):
        return
    JITFunction.run = quick(JITFunction.run)
    nvidia.make_tensordesc_arg = kept_descriptors(nvidia.make_tensordesc_arg)


def quick(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return what launches a kernel. run: Triton's own way, for kinds that are new or unusual."""

    @functools.wraps(run)
    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or type(grid) is not tuple:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        form = form_of(self, args, kwargs)
        if form is None:
            return run(self, *args, grid=grid, warmup=False, **kwargs)
        key, bound = form.bind((*args, *kwargs.values()))
        device = torch._C._cuda_getDevice()
        kernel = form.compiled.get((device, key))
        if kernel is None:
            kernel = run(self, *args, grid=grid, warmup=False, **kwargs)
            if type(kernel) is CompiledKernel:
                form.compiled[device, key] = kernel
            return kernel
        kernel.run(
            *grid,
            *(1,) * (3 - len(grid)),
            torch._C._cuda_getCurrentRawStream(device),
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *bound,
        )
        return kernel

    launch.is_quick = True  # type: ignore[attr-defined]
    return launch


def form_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
    """Return the form of launches like this one; None for one that only Triton's way takes."""
    kind = (len(args), *kwargs, *map(type, args), *map(type, kwargs.values()))
    forms: dict[tuple[Any, ...], Form | None] = kernel.__dict__.setdefault(_FORMS, {})
    if kind not in forms:
        forms[kind] = _made_form(kernel, args, kwargs)
    return forms[kind]


def _made_form(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form | None:
    places = {parameter.name: i for i, parameter in enumerate(kernel.params[: len(args)])}
    places |= {name: len(args) + i for i, name in enumerate(kwargs)}
    values = (*args, *kwargs.values())
    keys, bound, defaults = [], [], {}
    options = places.keys() - {parameter.name for parameter in kernel.params}
    for name in sorted(options):
        keys.append(f"v[{places[name]}]")
    for parameter in kernel.params:
        place = places.get(parameter.name)
        if place is None:
            default = defaults[f"default_{parameter.num}"] = parameter.default
            kinds: list[str] | None = [] if type(default) in _VALUES else None
            bound.append(f"default_{parameter.num}")
        else:
            kinds = _kinds(parameter, values[place], f"v[{place}]")
            pointer = isinstance(values[place], Tensor) and not parameter.is_constexpr
            bound.append(f"v[{place}].data_ptr()" if pointer else f"v[{place}]")
        if kinds is None:
            return None
        keys += kinds
    made: Bind = eval(f"lambda v: (({_tuple(keys)}), ({_tuple(bound)}))", defaults)
    try:
        hash(made(values)[0])
    except TypeError:
        return None
    return None if kernel.pre_run_hooks else Form(made, {})


def _tuple(parts: list[str]) -> str:
    return "".join(f"{part}, " for part in parts)


def _kinds(parameter: Any, value: Any, name: str) -> list[str] | None:
    """Return expressions for all that a kernel is compiled for, beside the argument's type.

    name: the expression for the value. None for a value that only Triton's way takes.
    """
    if parameter.is_constexpr:
        return None if isinstance(value, tuple | list) else [name]
    if value is None or type(value) is float:
        return []
    if isinstance(value, Tensor):
        return [f"{name}.dtype", f"{name}.data_ptr() & 15 == 0"]
    if type(value) is bool:
        return [name]
    if type(value) is int:
        fits = f"-2147483648 <= {name} <= 2147483647"
        return [fits, f"{name} == 1", f"{name} & 15 == 0"]
    if type(value).__name__ == "TensorDescriptor":
        layout = [f"{name}.layout"] if hasattr(value, "layout") else []
        return [f"{name}.base.dtype", f"(*{name}.block_shape,)", f"{name}.padding", *layout]
    return None


def kept_descriptors(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return `make`, which makes a descriptor of the copy engine, with what it made kept."""
    kept: dict[tuple[Any, ...], list[Any]] = {}

    @functools.wraps(make)
    def made(tiles: Any, metadata: Any, *others: Any) -> list[Any]:
        if metadata is None or others or getattr(tiles, "round_f32_to_tf32", False):
            return make(tiles, metadata, *others)
        key = (
            tiles.base.data_ptr(),
            id(metadata),
            *tiles.shape,
            *tiles.strides,
            tiles.padding,
        )
        found = kept.get(key)
        if found is None:
            if len(kept) >= _MOST_DESCRIPTORS:
                kept.clear()
            found = kept[key] = make(tiles, metadata)
        return found

    return made
