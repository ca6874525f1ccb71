"""The order of codes that products in C read: each code is in its place, and zeros fill it up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sidestep.kernels.native.library import NoLibraryError, load
from sidestep.kernels.native.packing import pack_codes
from sidestep.kernels.quantized.coded_matrix import pack_halves

GROUP = 32
SHAPES = [(1, 2), (16, 32), (17, 34), (5, 100), (40, 96), (33, 62)]


@pytest.fixture(autouse=True)
def kernels() -> None:
    try:
        load("packing.c")
    except NoLibraryError as error:
        pytest.skip(str(error))


def in_order(numbers: Tensor, tile: int, together: int) -> Tensor:
    """Return numbers [N, K] as [tiles, groups, vectors, rows of a tile, numbers of a row]."""
    rows, columns = numbers.shape
    filled = pad(numbers, (0, -columns % GROUP, 0, -rows % tile))
    by_vector = filled.view(-1, tile, filled.shape[1] // GROUP, GROUP // together, together)
    return by_vector.permute(0, 2, 3, 1, 4)


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_4_bits(shape: tuple[int, int], tile: int) -> None:
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_codes(pack_halves(codes), tile, 4).unflatten(3, (tile, 4))
    expected = in_order(codes, tile, 8)
    assert torch.equal(packed & 15, expected[..., :4])
    assert torch.equal(packed >> 4, expected[..., 4:])


@pytest.mark.parametrize("tile", [8, 16])
@pytest.mark.parametrize("shape", [*SHAPES, (3, 33), (9, 1)])
def test_codes_of_8_bits_lose_their_signs(shape: tuple[int, int], tile: int) -> None:
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    packed = pack_codes(codes, tile, 8).unflatten(3, (tile, 4))
    rows, columns = shape
    there = in_order(torch.ones(shape, dtype=torch.uint8), tile, 4).bool()
    assert torch.equal(
        packed[there], (in_order(codes, tile, 4).to(torch.int16) + 128)[there].byte()
    )
    assert not packed[~there].any() and int(there.sum()) == rows * columns


def test_rows_may_lie_apart() -> None:
    codes = torch.randint(-128, 128, (20, 70), dtype=torch.int8)
    assert torch.equal(pack_codes(codes[:, 3:67], 16, 8), pack_codes(codes[:, 3:67].clone(), 16, 8))
    assert torch.equal(pack_codes(codes.T, 16, 8), pack_codes(codes.T.contiguous(), 16, 8))
