"""Weights in GGUF files, under the names that layers ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.weights.gguf_blocks import CODED, coded, decoded
from sidestep.executor.weights.weight_loader import CheckpointWeights, OpenFile, Part
from sidestep.ipc.model.gguf.architectures import Named, named_tensors
from sidestep.ipc.model.gguf.header import (
    GgufHeader,
    StoredTensor,
    files_of,
    read_header,
)
from sidestep.kernels.quantized.coded_matrix import CodedMatrix


class GgufPart:
    """A matrix or a vector in a file, of which slices can be read. See Part."""

    def __init__(self, tensor: StoredTensor, named: Named) -> None:
        self._tensor, self._named = tensor, named
        shape = tensor.shape if named.item is None else tensor.shape[1:]
        self._shape = (1, *shape) if named.row else shape
        rows = tensor.num_rows
        self._first, self._rows = 0, rows
        if named.item is not None:
            self._rows = rows // tensor.shape[0]
            self._first = named.item * self._rows
        if named.heads and len(shape) == 1:  # a bias: its numbers are ordered as rows are
            self._rows = shape[0]

    @property
    def is_coded(self) -> bool:
        """Whether it has a form that products can keep."""
        return self._tensor.block.name in CODED

    @property
    def block_size(self) -> int:
        """Numbers of a block, along the columns."""
        return self._tensor.block.size

    def get_shape(self) -> Sequence[int]:
        """Return the shape of the whole part."""
        return self._shape

    def coded(self, rows: range, blocks: range, dtype: torch.dtype) -> CodedMatrix:
        """Return some rows, with some blocks of each."""
        block = self._tensor.block
        part = self._bytes(rows)[:, blocks.start * block.num_bytes : blocks.stop * block.num_bytes]
        return coded(part, block.name, block.num_bytes, dtype)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the elements that a slice of rows, or slices of rows and columns, select."""
        block = self._tensor.block
        rows, *columns = index if isinstance(index, tuple) else (index,)
        if len(self._shape) == 1:
            values = decoded(self._bytes(range(1)), block.name, block.num_bytes)[0]
            if self._named.heads:
                values = values[torch.from_numpy(self._order(range(self._shape[0])))]
        else:
            part = self._bytes(range(*rows.indices(self._shape[0])))
            values = decoded(part, block.name, block.num_bytes)
        if self._named.norm_offset:
            values = values.float() - self._named.norm_offset
        if len(self._shape) == 1:
            return values[rows]
        return values[:, columns[0]] if columns else values

    def _order(self, rows: range) -> Any:
        """Return where rows are stored: those of a head's halves are stored in turn."""
        wanted = np.arange(rows.start, rows.stop)
        if not self._named.heads:
            return wanted
        size = self._rows // self._named.heads
        within = wanted % size
        half = size // 2
        return wanted - within + 2 * (within % half) + within // half

    def _bytes(self, rows: range) -> Tensor:
        """Return the bytes of rows in their order, uint8 [N, bytes of a row]."""
        tensor = self._tensor
        data = np.memmap(
            tensor.file,
            mode="r",
            offset=tensor.offset,
            shape=(tensor.num_rows, tensor.row_bytes),
            dtype=np.uint8,
        )
        if len(self._shape) == 1:
            return torch.from_numpy(np.array(data))
        return torch.from_numpy(np.array(data[self._first + self._order(rows)]))


class _GgufFile:
    """The tensors of one of a model's files."""

    def __init__(self, header: GgufHeader, file: Path) -> None:
        self._parts = {
            one.name: GgufPart(tensor, one)
            for one in named_tensors(header)
            if (tensor := header.tensors[one.stored]).file == file
        }

    def keys(self) -> Iterable[str]:
        return self._parts.keys()

    def get_slice(self, name: str) -> Part:
        return self._parts[name]


class GgufWeights(CheckpointWeights):
    """One GGUF file, or the files that a model is split into."""

    kind, pattern = "GGUF", "*.gguf"
    whole_file, index = "", ""

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        """Open the files. path: of the first one."""
        self._header = read_header(path)
        super().__init__(path, dtype, device)

    def _open(self, file: Path) -> OpenFile:
        return _GgufFile(self._header, file)

    @classmethod
    def _files_of(cls, folder: Path) -> list[Path]:
        return files_of(folder)

    def matrix_part(self, name: str, shape: tuple[int, int]) -> GgufPart:
        """Return a matrix in the file. name: without ".weight"."""
        part = self.part(f"{name}.weight", shape)
        assert isinstance(part, GgufPart)
        return part
