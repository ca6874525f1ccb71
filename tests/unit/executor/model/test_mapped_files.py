"""Tensors in the pages of mapped files: what is read of the file is what lies in memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sidestep.executor.weights.checkpoints import TorchWeights
from sidestep.executor.weights.device_copies import fill, lines_of, pieces_of, place_of
from sidestep.executor.weights.mapped_files import MappedFiles, Place
from sidestep.executor.weights.weight_loader import CheckpointWeights, SafetensorsWeights

CPU = torch.device("cpu")
SHAPE = 3000, 1500
MAPS = Path("/proc/self/maps")
pytestmark = pytest.mark.skipif(not MAPS.exists(), reason="the system does not say what is mapped")


@pytest.fixture
def files() -> Iterator[MappedFiles]:
    found = MappedFiles()
    yield found
    found.close()


def write(folder: Path, kind: type[CheckpointWeights]) -> Path:
    """Write a file with two tensors of random numbers, and return its path."""
    tensors = {"a": torch.randn(7), "b": torch.randn(SHAPE)}
    file = folder / kind.whole_file
    if kind is TorchWeights:
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return file


def weights_in(folder: Path, kind: type[CheckpointWeights]) -> CheckpointWeights:
    return kind(str(folder), torch.float32, CPU)


def read(place: Place, num_bytes: int) -> bytes:
    return os.pread(place.descriptor, num_bytes, place.offset)


@pytest.mark.parametrize("kind", [SafetensorsWeights, TorchWeights])
@pytest.mark.parametrize("rows", [None, range(1234, 2999)], ids=["whole", "rows"])
def test_a_tensor_is_found_in_its_file(
    tmp_path: Path, files: MappedFiles, kind: type[CheckpointWeights], rows: range | None
) -> None:
    files.add(write(tmp_path, kind))
    with weights_in(tmp_path, kind) as weights:
        stored = weights.stored("b", SHAPE)  # a view, where the loader would copy a part
        tensor = stored if rows is None else stored[rows.start : rows.stop]
        place = files.place(tensor)
        assert place is not None
        assert read(place, tensor.nbytes) == tensor.numpy().tobytes()


def test_a_file_is_found_behind_a_link(tmp_path: Path, files: MappedFiles) -> None:
    """Folders of a hub's cache hold links."""
    (tmp_path / "blobs").mkdir()
    file = write(tmp_path, SafetensorsWeights)
    file.rename(tmp_path / "blobs" / "0123 456")
    file.symlink_to(Path("blobs") / "0123 456")
    files.add(file)
    with weights_in(tmp_path, SafetensorsWeights) as weights:
        tensor = weights.stored("b", SHAPE)
        place = files.place(tensor)
        assert place is not None and read(place, 400) == tensor.numpy().tobytes()[:400]


def test_other_memory_is_in_no_file(tmp_path: Path, files: MappedFiles) -> None:
    assert files.place(torch.zeros(100)) is None
    files.add(tmp_path / "missing")
    files.add(write(tmp_path, SafetensorsWeights))
    assert files.place(torch.zeros(1 << 20)) is None


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path, files: MappedFiles) -> None:
    """The memory keeps what was mapped; the file at the path has other numbers."""
    file = write(tmp_path, SafetensorsWeights)
    files.add(file)
    (tmp_path / "new").mkdir()
    write(tmp_path / "new", SafetensorsWeights).replace(file)
    with weights_in(tmp_path, SafetensorsWeights) as weights:
        assert files.place(weights.stored("b", SHAPE)) is None


@pytest.mark.parametrize("is_found", [True, False], ids=["from the file", "from memory"])
def test_pieces_are_filled_with_their_own_bytes(
    tmp_path: Path, files: MappedFiles, is_found: bool
) -> None:
    files.add(write(tmp_path, SafetensorsWeights))
    with weights_in(tmp_path, SafetensorsWeights) as weights:
        tensor = weights.stored("b", SHAPE)[1:]
        place = files.place(tensor) if is_found else None
        assert (place is not None) == is_found
        lines = lines_of(tensor)
        assert lines is not None and len(pieces_of(lines)) > 1
        found = torch.empty_like(lines)
        for piece in pieces_of(lines):
            fill(found[piece], lines[piece], place_of(piece, lines, place))
        assert found.equal(lines)


def test_a_piece_that_the_file_has_lost_comes_from_memory(tmp_path: Path) -> None:
    """A file may end early for its readers, as some network file systems show it."""
    tensor = torch.arange(1000)
    (tmp_path / "short").write_bytes(tensor.numpy().tobytes()[:1000])
    with (tmp_path / "short").open("rb") as file:
        room: Tensor = torch.zeros_like(tensor)
        fill(room, tensor, Place(file.fileno(), 0))
    assert room.equal(tensor)


def test_a_mapping_that_is_shown_in_parts_is_one(tmp_path: Path, files: MappedFiles) -> None:
    """A part with other flags, as madvise sets them, has a line of its own."""
    files.add(write(tmp_path, SafetensorsWeights))
    with weights_in(tmp_path, SafetensorsWeights) as weights:
        tensor = weights.stored("b", SHAPE)
        page = os.sysconf("SC_PAGE_SIZE")
        middle = (tensor.data_ptr() + tensor.nbytes // 2) // page * page
        sequential = 2
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.madvise(ctypes.c_void_p(middle), ctypes.c_size_t(page), sequential) == 0
        place = files.place(tensor)
        assert place is not None and read(place, tensor.nbytes) == tensor.numpy().tobytes()
