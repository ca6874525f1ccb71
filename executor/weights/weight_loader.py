"""Weights by their checkpoint names: whole, or the slice of a rank.

They come in the run's type and on its device. Layers ask for the weights that they need, so loading
and building are one pass and no second copy of the model exists. A weight that a checkpoint lacks,
that it has in another shape, or that it has and no layer asked for, is an error that names it.
"""

from __future__ import annotations

import abc
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from sidestep.executor.weights.device_copies import DeviceCopies
from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.quantized.coded_matrix import CodedMatrix

Shape = tuple[int, ...]
Matrix = Tensor | CodedMatrix
"""A matrix [N, K], in the run's type or quantized."""
_IGNORED = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")
"""Ends of the names of buffers that old checkpoints have and that follow from the config."""
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale", ".kv_scale", "_proj.output_scale")
"""Ends of the names of scales for keys and values of 8 bits."""
_DUMMY_ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar")
"""Ends of the names of norms and of factors, which are ones among random weights."""
_DUMMY_SCALE = 121
"""Scale of random weights of MXFP4, which are 0.09 at most."""
_COMPARED_ROWS = 4096
"""Rows of each of two tensors that are in memory at a time while they are compared."""


@dataclass(frozen=True)
class Wanted:
    """A matrix that a layer asks for, or a rank's part of it."""

    name: str
    """Without ".weight"."""
    shape: tuple[int, int]
    """N and K of the whole matrix."""
    rows: range
    columns: range


class Matrices(Protocol):
    """Gives the matrices of products, of which some are quantized."""

    rounds: ClassVar[bool]
    """Whether it rounds plain ones."""

    def __call__(self, weights: Any, wanted: Wanted) -> Matrix | None:
        """Return the matrix; None if it is not quantized."""

    def together(self, weights: Any, wanted: Sequence[Wanted]) -> Sequence[Matrix] | None:
        """Return matrices of one shape that are rounded at once, as each would be by itself.

        None where they cannot be.
        """


class Weights(abc.ABC):
    """A source of weights."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self.matrices: Matrices | None = None
        """Gives the quantized matrices, if there are any."""

    @abc.abstractmethod
    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the named tensor of this whole shape, or only some rows or columns of it."""

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        rows: range | None = None,
        columns: range | None = None,
    ) -> Matrix:
        """Return the matrix of a product, or only some rows or columns of it.

        It may be quantized. name: without the ending ".weight".
        """
        if self.matrices is not None:
            part = Wanted(name, shape, rows or range(shape[0]), columns or range(shape[1]))
            if (found := self.matrices(self, part)) is not None:
                return found
        return self.get(f"{name}.weight", shape, rows, columns)

    def numbers(self, name: str) -> Tensor | None:
        """Return all numbers of the checkpoint's named tensor, float32 [N]; None if it has none."""
        return None

    def exact(self, name: str, shape: Shape, rows: range | None = None) -> Tensor:
        """Return the named tensor in float32, for values that the run's type may not round."""
        return self.get(name, shape, rows).float()

    def item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return one item of the named tensor, or only some rows or columns of the item.

        shape: of the whole tensor, whose first dimension is that of the items.
        """
        return self.get(f"{name}.{index}", shape[1:], rows, columns)

    def packed_item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return an item of a tensor of bytes as they are stored: uint8. See `item`."""
        raise NotImplementedError


class Part(Protocol):
    """A tensor in a file, of which slices can be read."""

    def get_shape(self) -> Sequence[int]:
        """Return the shape of the whole tensor."""

    def __getitem__(self, index: Any) -> Tensor:
        """Return the elements that the index selects."""


class OpenFile(Protocol):
    """An open file of weights."""

    def keys(self) -> Iterable[str]:
        """Return the names of its tensors."""

    def get_slice(self, name: str) -> Part:
        """Return one of its tensors."""


class CheckpointWeights(Weights):
    """A folder with files of weights. A context manager.

    It has one file, or several files and an index.
    """

    kind: str
    """The kind of the files, for messages."""
    whole_file: str
    """Name of the file with all weights."""
    index: str
    """Name of the file that says which file has which tensor."""
    pattern: str
    """Pattern of the files' names in a folder that has neither."""

    def __init__(self, folder: str, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._files = ExitStack()
        self.to_device = DeviceCopies(device)
        """Copies what the files store to the device."""
        self._files.callback(self.to_device.close)
        self._handle_of: dict[str, OpenFile] = {}
        for file in self._files_of(Path(folder)):
            handle = self._open(file)
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                self._handle_of[name] = handle
        self._names: dict[str, str] = {}
        """Other names of tensors -> their names in the files."""
        self._views: dict[str, Part] = {}
        """Tensors that are parts of others, by name."""
        self._unused = set(self._handle_of)

    @abc.abstractmethod
    def _open(self, file: Path) -> OpenFile:
        """Return the open file. Raises EngineStartError for one that cannot be read."""

    @classmethod
    def _files_of(cls, folder: Path) -> list[Path]:
        """Return the files that the index names.

        Without an index, it is the whole file; without that, all files of the pattern.
        """
        index = folder / cls.index
        if index.exists():
            names = _names_in(index)
            missing = [n for n in names if not (folder / n).exists()]
            if missing:
                raise EngineStartError(
                    f"model: {folder} lacks {', '.join(missing)}, which its index names"
                )
            return [folder / n for n in names]
        if (folder / cls.whole_file).exists():
            return [folder / cls.whole_file]
        return sorted(folder.glob(cls.pattern))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handle_of

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the named tensor, whole or only some of its rows or columns."""
        tensor = self._read(name, shape, rows, columns)
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise EngineStartError(
                f"model: {name} is {tensor.dtype} in the checkpoint, but nothing there says how it "
                "is quantized, or it must not be"
            )
        return self.to_device(tensor).to(self.dtype).contiguous()

    def stored(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return the named tensor as it is stored, in the host's memory."""
        return self._read(name, shape, rows, columns)

    def stored_shape(self, name: str) -> Shape:
        """Return the shape of a tensor that the checkpoint has."""
        return tuple(self._handle_of[name].get_slice(self.stored_name(name)).get_shape())

    def numbers(self, name: str) -> Tensor | None:
        """Return all numbers of a tensor, whatever its shape."""
        return self.exact(name, self.stored_shape(name)).flatten() if name in self else None

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in the files."""
        return self._names.get(name, name)

    def exact(self, name: str, shape: Shape, rows: range | None = None) -> Tensor:
        """Return the named tensor in float32, from the checkpoint's own type."""
        return self.to_device(self._read(name, shape, rows, None)).float()

    def item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return one item of the named tensor, whole or only some of its rows or columns."""
        tensor = self._read(name, shape, rows, columns, index)
        return self.to_device(tensor).to(self.dtype).contiguous()

    def packed_item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return one item of a tensor of bytes. Raises EngineStartError for another type."""
        tensor = self._read(name, shape, rows, columns, index)
        if tensor.dtype != torch.uint8:
            raise EngineStartError(f"model: {name} is {tensor.dtype} in the checkpoint, not uint8")
        return self.to_device(tensor).contiguous()

    def _read(
        self,
        name: str,
        shape: Shape,
        rows: range | None,
        columns: range | None,
        item: int | None = None,
    ) -> Tensor:
        """Read a tensor, or one of the items in its first dimension."""
        part = self.part(name, shape)
        parts = [
            slice(None) if one is None else slice(one.start, one.stop) for one in (rows, columns)
        ]
        if item is not None:
            return part[(slice(item, item + 1), *parts[: len(shape) - 1])][0]
        return part[tuple(parts[: len(shape)])]

    def part(self, name: str, shape: Shape) -> Part:
        """Return the named tensor of this shape, from which slices can be read."""
        if name in self._views:
            return self._views[name]
        handle = self._handle_of.get(name)
        if handle is None:
            raise EngineStartError(f"model: the checkpoint lacks {name}")
        stored = self._names.get(name, name)
        self._unused -= {name, stored}
        part = handle.get_slice(stored)
        found = tuple(part.get_shape())
        if found != shape:
            raise EngineStartError(
                f"model: {name} has shape {list(found)} in the checkpoint, config.json wants "
                f"{list(shape)}"
            )
        return part

    def view(self, name: str, part: Part) -> None:
        """Read this part of another tensor, which has the right shape, where `name` is asked for.

        The checkpoint lacks `name`.
        """
        self._views[name] = part

    def alias(self, name: str, other: str) -> None:
        """Read the checkpoint's tensor `other` where `name` is asked for.

        The checkpoint lacks `name`.
        """
        self._handle_of[name] = self._handle_of[other]
        self._names[name] = self._names.get(other, other)

    def rename(self, name_of: Callable[[str], str | None]) -> None:
        """Give tensors the names that layers ask for. None: the tensor is not used."""
        names = {new: name for name in self._handle_of if (new := name_of(name)) is not None}
        self._handle_of = {new: self._handle_of[name] for new, name in names.items()}
        self._names = {new: self._names.get(name, name) for new, name in names.items()}
        self._unused = set(self._handle_of)

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors of the checkpoint hold the same values.

        They are read part by part.
        """
        parts = [
            self._handle_of[name].get_slice(self._names.get(name, name)) for name in (one, other)
        ]
        shapes = [tuple(part.get_shape()) for part in parts]
        if shapes[0] != shapes[1] or not shapes[0]:
            return False
        starts = range(0, shapes[0][0], _COMPARED_ROWS)
        pairs = ([part[row : row + _COMPARED_ROWS] for part in parts] for row in starts)
        return all(torch.equal(first, second) for first, second in pairs)

    def ignore(self, *beginnings: str) -> None:
        """Allow tensors whose names begin so to be in the checkpoint unused."""
        self._unused = {name for name in self._unused if not name.startswith(beginnings)}

    def leave(self, names: Iterable[str]) -> None:
        """Allow these tensors, which other ranks read, to be in the checkpoint unused."""
        self._unused.difference_update(names)

    def finish(self) -> None:
        """Raise EngineStartError if the checkpoint has a tensor that no layer asked for.

        It is called when all layers have their weights.
        """
        # A cache in the run's type, or with scales that it computes, needs none of these.
        left = sorted(n for n in self._unused if not n.endswith(_IGNORED + _KV_SCALES))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise EngineStartError(
                f"model: the checkpoint has {left[0]}{more}, which this architecture does not use"
            )


class SafetensorsWeights(CheckpointWeights):
    """A folder with safetensors files."""

    kind, pattern = "safetensors", "*.safetensors"
    whole_file, index = "model.safetensors", "model.safetensors.index.json"

    def _open(self, file: Path) -> OpenFile:
        try:
            handle: OpenFile = self._files.enter_context(safe_open(file, framework="pt"))
        except Exception as error:  # the library raises its own and the system's
            raise EngineStartError(
                f"model: {file} cannot be read as safetensors: {error}"
            ) from None
        return handle


class DummyWeights(Weights):
    """Random weights, the same for any number of ranks.

    Each whole tensor is drawn from its own seed.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        self._seed = seed

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return random values in the named tensor's shape; ones for norms and factors."""
        if name.endswith(_DUMMY_ONES):
            own = shape if rows is None else (len(rows), *shape[1:])
            return torch.ones(own, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) ^ self._seed)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(
            0.0, 0.02, generator=generator
        )
        if rows is not None:
            tensor = tensor[rows.start : rows.stop].clone()
        if columns is not None:
            tensor = tensor[:, columns.start : columns.stop].clone()
        return tensor

    def packed_item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return random bytes; for scales, those of a small power of two."""
        seed = zlib.crc32(f"{name}.{index}".encode()) ^ self._seed
        generator = torch.Generator(self.device).manual_seed(seed)
        item = torch.randint(
            256, shape[1:], dtype=torch.uint8, generator=generator, device=self.device
        )
        if name.endswith("_scales"):
            item.fill_(_DUMMY_SCALE)
        return _part(item, rows, columns).clone()


class NoWeights(Weights):
    """Shapes alone, for torch's meta device."""

    def get(
        self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """Return an empty tensor in the shape that was asked for."""
        if rows is not None:
            shape = (len(rows), *shape[1:])
        if columns is not None:
            shape = (shape[0], len(columns))
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def packed_item(
        self,
        name: str,
        shape: Shape,
        index: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> Tensor:
        """Return empty bytes in the shape that was asked for."""
        item = torch.empty(shape[1:], dtype=torch.uint8, device=self.device)
        return _part(item, rows, columns).contiguous()


def _part(tensor: Tensor, rows: range | None, columns: range | None) -> Tensor:
    """Return some rows or columns of a tensor, or all of it."""
    if rows is not None:
        return tensor[rows.start : rows.stop]
    return tensor if columns is None else tensor[:, columns.start : columns.stop]


def _names_in(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise EngineStartError(
            f"model: {index} does not hold a JSON object with a weight_map"
        ) from None
