"""Parts of a device's processors, each with a stream whose kernels run on these processors alone.

They are NVIDIA's green contexts. A CUDA graph keeps them: a kernel that is captured on such a
stream runs on its processors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from sidestep.kernels.gpu import is_hopper
from sidestep.kernels.launch import num_processors

_WHOLE = 8
"""Hopper's processors are divided in multiples of this."""


class ProcessorPart(NamedTuple):
    """Some of a device's processors."""

    processors: int
    stream: torch.cuda.Stream | None
    """None where no kernel runs."""


Parts = tuple[ProcessorPart, ProcessorPart]


@functools.cache
def split_processors(device: torch.device, first: int) -> Parts | None:
    """Return two parts of a device, or None where it has no such parts.

    first: processors of the first part, a multiple of 8.
    """
    assert first % _WHOLE == 0
    if not is_hopper(device) or num_processors(device) <= first:
        return None
    if device.type != "cuda":
        rest = num_processors(device) - first
        return ProcessorPart(first, None), ProcessorPart(rest, None)
    from cuda.bindings import driver

    torch.cuda.current_stream(device)  # makes the context
    try:
        index = torch.cuda.current_device() if device.index is None else device.index
        own = _checked(driver.cuDeviceGet(index))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = _checked(driver.cuDeviceGetDevResource(own, kind))
        groups, *_, rest = _checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, first))
        return _part(own, groups[0], device), _part(own, rest, device)
    except RuntimeError:
        return None


def _part(own: Any, resource: Any, device: torch.device) -> ProcessorPart:
    """Return a part with these processors."""
    from cuda.bindings import driver

    description = _checked(driver.cuDevResourceGenerateDesc([resource], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _checked(driver.cuGreenCtxCreate(description, own, flags))
    kind = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    stream = _checked(driver.cuGreenCtxStreamCreate(context, kind, 0))
    return ProcessorPart(resource.sm.smCount, torch.cuda.ExternalStream(int(stream), device))


def _checked(result: tuple[Any, ...]) -> Any:
    """Return what a function of the driver returned. Raises RuntimeError for an error."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"parts of a device: {error}")
    return values[0] if len(values) == 1 else values
