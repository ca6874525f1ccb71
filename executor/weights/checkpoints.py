"""Weights in pytorch_model.bin, and the choice of a folder's source of weights.

Such a file is a pickle, which could run any code when it is read. Only torch's restricted unpickler
reads it here: it makes tensors and plain containers, and refuses everything else.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sidestep.executor.weights.gguf_weights import GgufWeights
from sidestep.executor.weights.weight_loader import (
    CheckpointWeights,
    OpenFile,
    Part,
    SafetensorsWeights,
)
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.gguf.header import is_gguf

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""The name of a Python object in the restricted unpickler's message."""


class TorchWeights(CheckpointWeights):
    """A folder with files that torch.save has written: pytorch_model.bin, or its shards."""

    kind, pattern = "pytorch_model.bin", "pytorch_model*.bin"
    whole_file, index = "pytorch_model.bin", "pytorch_model.bin.index.json"

    def _open(self, file: Path) -> OpenFile:
        try:
            # Files of torch before 1.6 are no zip archives, and cannot be mapped into memory.
            found = torch.load(
                file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
            )
        except Exception as error:  # the unpickler raises many types for a broken file
            raise EngineStartError(f"model: {file} {_problem(error)}") from None
        if not isinstance(found, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
        ):
            raise EngineStartError(
                f"model: {file} does not hold a dict of tensors by their names alone"
            )
        return _TorchFile(found)


class _TorchFile:
    """The tensors of one file, which lie in its pages where the file is mapped."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_slice(self, name: str) -> Part:
        return _TorchPart(self._tensors[name].detach())


class _TorchPart:
    """One tensor of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> Sequence[int]:
        return self._tensor.shape

    def __getitem__(self, index: Any) -> Tensor:
        part = self._tensor[index]
        # A view of a part would keep the memory of the whole tensor.
        return part if part.numel() == self._tensor.numel() else part.clone()


def _problem(error: Exception) -> str:
    """Return in one line why a file cannot be read."""
    message = str(error)
    if type(error).__name__ == "UnpicklingError" and (found := _REFUSED.search(message)):
        return (
            f"holds a Python object ({found[1]}) beside tensors, which is not read because it "
            "could run code; save the tensors alone as safetensors"
        )
    reason = message.strip().splitlines()[0] if message.strip() else type(error).__name__
    return f"cannot be read as a file of tensors: {reason}"


_BY_FORMAT: dict[str, tuple[type[CheckpointWeights], ...]] = {
    "auto": (SafetensorsWeights, TorchWeights),
    "safetensors": (SafetensorsWeights,),
    "pt": (TorchWeights,),
}
"""load_format -> kinds of files that are looked for, in this order."""


def open_checkpoint(
    folder: str, load_format: str, dtype: torch.dtype, device: torch.device
) -> CheckpointWeights:
    """Return the weights of a folder, of the first kind that it has, or those of a GGUF file.

    load_format: 'auto', 'safetensors' or 'pt'. Raises EngineStartError, in one line, if there are
    none or they cannot be read.
    """
    if is_gguf(folder):
        if load_format != "auto":
            raise EngineStartError(
                f"load_format: {load_format!r} does not read {folder}; 'auto' and 'dummy' fit a "
                "GGUF file"
            )
        return GgufWeights(folder, dtype, device)
    kinds, place = _BY_FORMAT[load_format], Path(folder)
    # A copy of a hub's folder may have the index of files that were not fetched.
    for kind in kinds:
        if any(place.glob(kind.pattern)):
            return kind(folder, dtype, device)
    for kind in kinds:
        if (place / kind.index).exists():
            return kind(folder, dtype, device)
    names = " nor ".join(kind.kind for kind in kinds)
    raise EngineStartError(f"model: {folder} has no {names} files (load_format 'dummy' needs none)")
