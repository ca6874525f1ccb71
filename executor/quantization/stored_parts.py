"""Parts of tensors of quantized matrices, as files have them, with checks of types and borders."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from sidestep.executor.weights.weight_loader import CheckpointWeights, Shape, Wanted
from sidestep.ipc.common.errors import EngineStartError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types of numbers in files."""
SCALES = (*FLOATS, torch.float8_e8m0fnu)
"""Types of scales in files."""


def whole_groups(wanted: Wanted, width: int) -> range:
    """Return the groups of the columns. Raises EngineStartError if one is cut in two."""
    first, last = wanted.columns.start, wanted.columns.stop
    if width >= wanted.shape[1]:  # one group of all inputs, whose scale each rank has
        return range(1)
    if first % width or (last % width and last != wanted.shape[1]):
        raise EngineStartError(
            f"tensor_parallel_size: a rank's inputs {first} to {last} of {wanted.name} cut a "
            f"group of {width} that share a scale; use fewer ranks"
        )
    return range(first // width, -(-last // width))


def read_as(
    files: CheckpointWeights,
    types: Collection[torch.dtype],
    name: str,
    shape: Shape,
    rows: range | None = None,
    columns: range | None = None,
) -> Tensor:
    """Return a tensor as it is stored, on the device, which is faster at what is made of it.

    Raises EngineStartError unless it has one of these types.
    """
    found = files.stored(name, shape, rows, columns)
    if found.dtype not in types:
        said = " or ".join(str(one) for one in types)
        raise EngineStartError(f"model: {name} is {found.dtype} in the checkpoint, not {said}")
    return files.to_device(found)


def check_words(
    wanted: Wanted, size: int, part: range, per_word: int, unit: int | None = None
) -> None:
    """Raise EngineStartError unless a dimension and a rank's part of it are whole words.

    unit: what the dimension is a multiple of, where the last word may be filled up; None for words.
    """
    unit = unit or per_word
    if size % unit:
        raise EngineStartError(
            f"model: {wanted.name} has {size} numbers along the dimension that is packed, which "
            f"must be a multiple of {unit}"
        )
    if part.start % per_word or (part.stop % per_word and part.stop != size):
        raise EngineStartError(
            f"tensor_parallel_size: a rank's part {part.start} to {part.stop} of {wanted.name} is "
            f"not a multiple of {per_word}; use fewer ranks"
        )


def group_scales(
    files: CheckpointWeights,
    name: str,
    wanted: Wanted,
    group: tuple[int, int],
    types: Collection[torch.dtype] = SCALES,
) -> tuple[Tensor, tuple[int, int]]:
    """Return the scales of the wanted part in float32, and their group.

    group: R and G. types: those of files. A part that begins within a group of rows gets scales of
    each row's own.
    """
    height, width = group
    rows, columns = wanted.shape
    shape = -(-rows // height), -(-columns // width)
    own = whole_groups(wanted, width)
    first, last = wanted.rows.start, wanted.rows.stop
    stored = read_as(files, types, name, shape, range(first // height, -(-last // height)), own)
    scales = stored.float()
    width = min(width, len(wanted.columns))
    if first % height == 0:
        return scales.contiguous(), (height, width)
    spread = scales.repeat_interleave(height, 0)
    start = first % height
    return spread[start : start + len(wanted.rows)].contiguous(), (1, width)
