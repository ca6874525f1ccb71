"""Copies of weights through pinned memory: every byte arrives, whatever part of a file is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sidestep.executor.weights.device_copies import DeviceCopies

ROWS, COLUMNS = 9001, 2064  # no whole pieces

PARTS = {
    "whole": (slice(None), slice(None)),
    "rows": (slice(17, 8999), slice(None)),
    "columns": (slice(None), slice(1032, None)),
    "rows and columns": (slice(3, 9000), slice(8, 2056)),
    "few numbers": (slice(5, 6), slice(None)),
    "none": (slice(5, 5), slice(None)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8])
def test_parts_of_a_file_arrive_as_they_are(
    tmp_path: Path, dtype: torch.dtype, part: tuple[slice, slice]
) -> None:
    """Copy one part again and again, while the device has other work that uses its memory."""
    device = torch.device("cuda", 0)
    given = torch.randint(-128, 128, (ROWS, COLUMNS * dtype.itemsize), dtype=torch.int8)
    save_file({"weight": given.view(dtype)}, tmp_path / "model.safetensors")
    copies = DeviceCopies(device)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = file.get_slice("weight")[part]
        busy = torch.randn(4096, 4096, device=device)
        for _ in range(3):
            scratch = torch.full((2 * ROWS, COLUMNS), 7, dtype=torch.int64, device=device)
            for _ in range(4):
                busy = busy @ busy
            scratch.add_(1)
            del scratch  # the copy may be given this memory, which the device still writes
            found = copies(stored)
            assert bits(found.cpu()).equal(bits(stored.contiguous()))
    copies.close()


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's memory; codes that are not numbers are equal to nothing."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.gpu
def test_tensors_of_other_shapes_arrive() -> None:
    copies = DeviceCopies(torch.device("cuda", 0))
    for shape in ((), (1,), (3 << 20,), (3, 5, 1 << 18), (2, 5 << 20)):
        tensor = torch.randn(shape)
        assert copies(tensor).cpu().equal(tensor)
    wide = torch.randn(4, 6 << 20)[:, 1:]  # lines that are longer than a buffer
    assert copies(wide).cpu().equal(wide)
    copies.close()
