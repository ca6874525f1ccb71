"""Where a tensor that lies in the pages of a mapped file is in that file.

Threads that read the file at that place into memory of their own need no page of the mapping.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

_MAPS = Path("/proc/self/maps")


class Place(NamedTuple):
    """Bytes of a file."""

    descriptor: int
    """The open file's."""
    offset: int


class _Mapping(NamedTuple):
    first: int
    """Addresses, from the first one to before the end."""
    end: int
    place: Place
    """The file's first byte that is mapped."""

    def joined(self, following: _Mapping) -> _Mapping | None:
        """Return this mapping with one that continues it; None if the other does not."""
        (descriptor, offset), size = self.place, self.end - self.first
        if following.first != self.end or following.place != (descriptor, offset + size):
            return None
        return _Mapping(self.first, following.end, self.place)


class MappedFiles:
    """Files that someone maps into this process's memory."""

    def __init__(self) -> None:
        """Know no file yet."""
        self._open = ExitStack()
        self._descriptors: dict[str, int] = {}
        """By the path without links."""
        self._mappings: list[_Mapping] | None = None
        """None if they are to be looked for again."""

    def add(self, file: Path) -> None:
        """Open a file, before it is mapped. Nothing happens if it cannot be read.

        It must be mapped before a tensor is looked for.
        """
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._open.callback(os.close, descriptor)
        self._descriptors[os.path.realpath(file)] = descriptor
        self._mappings = None

    def close(self) -> None:
        """Close the files."""
        self._open.close()
        self._descriptors.clear()
        self._mappings = None

    def place(self, tensor: Tensor) -> Place | None:
        """Return where a contiguous tensor of the host is in a file; None if it is in none."""
        first = tensor.data_ptr()
        end = first + tensor.nbytes
        if self._mappings is None:
            self._mappings = self._find()
        for mapping in self._mappings:
            if mapping.first <= first and end <= mapping.end:
                descriptor, offset = mapping.place
                return Place(descriptor, offset + first - mapping.first)
        return None

    def _find(self) -> list[_Mapping]:
        """Return the parts of the files that are mapped now."""
        try:
            lines = os.fsdecode(_MAPS.read_bytes()).splitlines()
        except OSError:
            return []
        found: list[_Mapping] = []
        for line in lines:
            addresses, _, offset, _, _, *path = line.split(maxsplit=5)
            descriptor = self._descriptors.get(path[0]) if path else None
            if descriptor is not None and _is_at(descriptor, path[0]):
                first, end = (int(address, 16) for address in addresses.split("-"))
                own = _Mapping(first, end, Place(descriptor, int(offset, 16)))
                # The system may show a mapping in parts.
                joined = found[-1].joined(own) if found else None
                found[-1:] = [joined] if joined is not None else [*found[-1:], own]
        return found


def _is_at(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False
