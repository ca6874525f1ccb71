"""Descriptors of tiles that are read by 256 bytes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from sidestep.kernels.launch import has_pdl
from sidestep.kernels.wide_reads import filled_wide, wide_reads
from tests.triton.support import DEVICE

on_hopper = pytest.mark.skipif(not has_pdl(DEVICE), reason="needs a GPU like Hopper or later")
WORDS, ROWS, COLUMNS = 32, 64, 1024


def arguments_of(matrix: torch.Tensor) -> tuple[Any, ...]:
    """Return Triton's arguments for tiles [64, 32] of an int32 matrix, swizzled by 128 bytes."""
    swizzle, uint32, zeros = 3, 2, 0
    shape, strides = list(matrix.shape), [matrix.stride(0), 1]
    return matrix.data_ptr(), swizzle, 4, uint32, [ROWS, WORDS], shape, strides, zeros


def bytes_of(descriptor: object) -> bytes:
    return ctypes.string_at(id(descriptor) + 128, 128)


@on_hopper
def test_only_the_matrix_that_is_named_is_read_wide() -> None:
    codes = torch.zeros(2 * ROWS, COLUMNS, dtype=torch.int32, device=DEVICE)
    other = torch.zeros_like(codes)
    utils = triton.runtime.driver.active.utils
    name = next(
        n for n in ("fill_tma_descriptor", "fill_tma_descriptor_tiled") if hasattr(utils, n)
    )
    plain, plain_other = (bytes_of(getattr(utils, name)(*arguments_of(m))) for m in (codes, other))
    with wide_reads(codes):
        wide, unnamed = (bytes_of(getattr(utils, name)(*arguments_of(m))) for m in (codes, other))
    assert unnamed == plain_other
    # The promotion is a field of two bits: 2 stands for 128 bytes and 3 for 256.
    changed = int.from_bytes(wide, "little") ^ int.from_bytes(plain, "little")
    assert changed.bit_count() == 1
    assert int.from_bytes(wide, "little") & changed
    assert bytes_of(getattr(utils, name)(*arguments_of(codes))) == plain


def test_what_is_not_a_descriptor_of_triton_is_left_alone() -> None:
    given = SimpleNamespace(kept=1)
    address = 4096
    found = filled_wide(
        lambda *_: given, address, address, 3, 4, 4, [64, 32], [128, 1024], [1024, 1], 0
    )
    assert found is given
    assert given.kept == 1


@pytest.mark.parametrize("name", ["fill_tma_descriptor", "fill_tma_descriptor_tiled"])
def test_the_function_of_triton_comes_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        return None

    utils = SimpleNamespace(**{name: fill})
    stand_in = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", stand_in)
    with pytest.raises(ValueError, match="launch"), wide_reads(torch.zeros(1)):
        assert getattr(utils, name) is not fill
        raise ValueError("launch")
    assert getattr(utils, name) is fill


def test_a_process_that_only_compiles_has_nothing_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(active=SimpleNamespace())
    monkeypatch.setattr(triton.runtime, "driver", stand_in)
    with wide_reads(torch.zeros(1)):
        assert vars(stand_in.active) == {}
