"""The header of a GGUF file: metadata by keys, and a table of tensors. No tensor is read.

The format is little endian: magic, version, two counts, the metadata, the table. A vocabulary has
hundreds of thousands of strings, which are walked over and not kept.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sidestep.ipc.common.errors import EngineStartError

ENDING = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Bytes; of files that do not state another alignment."""
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Types of metadata -> their codes for struct."""
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class Block(NamedTuple):
    """A type of tensor: `size` numbers take `num_bytes` bytes."""

    name: str
    size: int
    num_bytes: int


BLOCKS = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2),
    2: Block("Q4_0", 32, 18),
    3: Block("Q4_1", 32, 20),
    6: Block("Q5_0", 32, 22),
    7: Block("Q5_1", 32, 24),
    8: Block("Q8_0", 32, 34),
    10: Block("Q2_K", 256, 84),
    11: Block("Q3_K", 256, 110),
    12: Block("Q4_K", 256, 144),
    13: Block("Q5_K", 256, 176),
    14: Block("Q6_K", 256, 210),
    20: Block("IQ4_NL", 32, 18),
    23: Block("IQ4_XS", 256, 136),
    30: Block("BF16", 1, 2),
}
"""Types of tensors that are read, by their ids."""
_OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""Names of further types, for messages."""
PLAIN = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """The last dimension is that of neighbours."""
    block: Block
    file: Path
    offset: int
    """First byte in the file."""

    @property
    def num_rows(self) -> int:
        """Rows of numbers that are neighbours in the file."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[-1] // self.block.size * self.block.num_bytes


class GgufHeader(NamedTuple):
    """The metadata and the table of tensors of a model's files."""

    path: Path
    """The first file."""
    values: dict[str, Any]
    """Metadata of the first file. An array of strings is its length alone."""
    tensors: dict[str, StoredTensor]
    """Tensors of all files, by their names in them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the first file before its first tensor."""
        starts = (one.offset for one in self.tensors.values() if one.file == self.path)
        return min(starts, default=self.path.stat().st_size)


def is_gguf(path: str | Path) -> bool:
    """Return whether a model's path is that of a GGUF file."""
    return str(path).endswith(ENDING)


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other model; None if it has none.

    Raises EngineStartError for files of several models.
    """
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        return None
    found = sorted({_first(file) for file in folder.glob(f"*{ENDING}")})
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise EngineStartError(
            f"model: {folder} has several GGUF models ({names}); give the path of one"
        )
    return found[0] if found else None


def _first(file: Path) -> Path:
    """Return the first of the files that belong together with this one."""
    found = _SPLIT.search(file.name)
    return file if found is None else _part(file, found, 1)


def _part(file: Path, found: re.Match[str], number: int) -> Path:
    return file.with_name(f"{file.name[: found.start()]}-{number:05}-of-{found[2]}{ENDING}")


def files_of(path: Path) -> list[Path]:
    """Return all files of a model. Raises EngineStartError if one is missing."""
    found = _SPLIT.search(path.name)
    files = [path]
    if found is not None:
        files = [_part(path, found, number + 1) for number in range(int(found[2]))]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise EngineStartError(f"model: {path.parent} lacks {', '.join(missing)}")
    return files


def read_header(path: str | Path) -> GgufHeader:
    """Read the headers of a model's files. Raises EngineStartError with one line on the problem."""
    files = files_of(Path(path))
    values: dict[str, Any] = {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        own, found = _read_file(file)
        values = values or own
        tensors |= found
    return GgufHeader(files[0], values, tensors)


def read_arrays(path: str | Path, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return some arrays of strings of the first file's metadata, whole."""
    values, _ = _read_file(Path(path), names)
    return {name: values[name] for name in names if name in values}


def _read_file(
    file: Path, kept: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Cursor(file, data).read(kept)
    except (OSError, ValueError, struct.error) as error:
        raise EngineStartError(f"model: {file} cannot be read as GGUF: {error}") from None


class _Cursor:
    """Reads one file from its beginning."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 4
        if data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        (version,) = self._take("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; supported are 2 and 3, little endian")

    def read(self, kept: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """Return the metadata and the tensors. kept: keys whose strings are kept."""
        num_tensors, num_values = self._take("QQ")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            (kind,) = self._take("I")
            values[key] = self._value(kind, key in kept)
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", _ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in table:
            tensor = StoredTensor(name, shape, self._block(name, kind), self._file, start + offset)
            if shape[-1] % tensor.block.size:
                raise ValueError(f"{name} has rows of {shape[-1]}, which are no whole blocks")
            if tensor.offset + tensor.num_rows * tensor.row_bytes > len(self._data):
                raise ValueError(f"it ends before the end of {name}")
            tensors[name] = tensor
        return values, tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (num_dims,) = self._take("I")
        dims = self._take(f"{num_dims}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(dims)) or (1,), kind, offset

    def _block(self, name: str, kind: int) -> Block:
        if kind not in BLOCKS:
            known = ", ".join(block.name for block in BLOCKS.values())
            raise EngineStartError(
                f"model: {name} in {self._file} has the type {_OTHERS.get(kind, kind)}, which is "
                f"not supported; supported are {known}"
            )
        return BLOCKS[kind]

    def _value(self, kind: int, keep: bool) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._take(self._code(kind))[0]
        kind, count = self._take("IQ")
        if kind != _STRING:
            return list(self._take(f"{count}{self._code(kind)}"))
        if keep:
            return [self._text() for _ in range(count)]
        data, at = self._data, self._at
        for _ in range(count):
            at += 8 + int.from_bytes(data[at : at + 8], "little")
        self._at = at
        return count

    def _code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"its metadata has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _text(self) -> str:
        (length,) = self._take("Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found
