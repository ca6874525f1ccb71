"""Blocks of GGUF files give the numbers that the format's own package decodes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.weights.gguf_blocks import CODED, coded, decoded
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.gguf.header import BLOCKS
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.gguf_files import decoded as expected_of
from tests.gguf_files import encoded, library

SIZES = {block.name: block.num_bytes for block in BLOCKS.values()}


def rows_of(kind: str, seed: int = 0) -> tuple[Tensor, Any]:
    """Return rows of a type as bytes, and their numbers."""
    library()
    values = np.random.default_rng(seed).normal(0, 0.3, (6, 512)).astype(np.float32)
    blocks = encoded(values, kind, seed) if kind != "F32" else values
    numbers = expected_of(blocks, kind) if kind != "F32" else values
    return torch.from_numpy(blocks.view(np.uint8).reshape(6, -1)), torch.from_numpy(
        np.array(numbers, dtype=np.float32)
    )


@pytest.mark.parametrize("kind", SIZES)
def test_blocks_are_decoded_as_the_package_does(kind: str) -> None:
    rows, expected = rows_of(kind)
    found = decoded(rows, kind, SIZES[kind])
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("other", ["Q6_K", "Q4_0", "F32"])
@pytest.mark.parametrize("kind", sorted(CODED))
def test_matrices_of_two_types_are_stacked_without_a_change(kind: str, other: str) -> None:
    rows, expected = rows_of(kind)
    more, below = rows_of(other, seed=1)
    first = coded(rows, kind, SIZES[kind], torch.float32)
    second = coded(more, other, SIZES[other], torch.float32) if other in CODED else below
    whole = stacked({"q": first, "v": second})
    assert isinstance(whole, CodedMatrix) == (other in CODED)
    numbers = whole.decoded() if isinstance(whole, CodedMatrix) else whole
    torch.testing.assert_close(numbers, torch.cat([expected, below]), rtol=1e-6, atol=1e-6)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(2, SIZES["Q2_K"], dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(EngineStartError, match=r"Q2_K are decoded by .* pip install 'sidestep\[g"):
        decoded(rows, "Q2_K", SIZES["Q2_K"])
