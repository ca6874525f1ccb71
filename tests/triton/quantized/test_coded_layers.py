"""Layers with quantized weights, on a stand-in for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sidestep.executor.layers.linear import Linear
from sidestep.executor.layers.matrix_products import stacked
from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.gpu import Gpu, like_gpu
from sidestep.kernels.ops.rms_norm import RmsNorm, Stream
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.triton.quantized.coded_matrices import WHOLE, Form, matrix_of
from tests.triton.support import (
    DEVICE,
    DTYPE,
    INTERPRETED,
    Values,
    assert_close,
    assert_margins_untouched,
    poisoned,
)


@pytest.fixture(autouse=True)
def on_a_gpu() -> Iterator[None]:
    """Let the CPU stand for a GPU without programmatic dependent launch."""
    if INTERPRETED:
        with like_gpu(Gpu(80, 2), "cpu"):
            yield
    else:
        yield


def test_a_layer_multiplies_from_codes_into_the_memory_it_is_given() -> None:
    given = matrix_of(Form("int4", 128, zeros=True), 72, 256, DTYPE)
    head = Linear(given)
    assert repr(head) == "Linear(256 -> 72, int4)"
    hidden = Values(0).normal(3, 256, dtype=DTYPE, scale=7)
    norm = RmsNorm(Values(1).normal(256, dtype=DTYPE), 1e-5)
    out = poisoned(3, 72, dtype=DTYPE)
    assert head(Stream(hidden, norm), out) is out
    assert_margins_untouched(out)
    expected = norm(hidden).double() @ given.decoded(torch.float32).double().T
    assert_close(out, expected)


def test_stacked_parts_give_the_products_of_each() -> None:
    parts: dict[str, CodedMatrix] = {
        name: matrix_of(Form("fp8", 128, 128), rows, 256, DTYPE)
        for name, rows in (("gate", 130), ("up", 130))
    }
    whole = Linear(stacked(dict(parts)))
    x = Values(0).normal(3, 256, dtype=DTYPE)
    gate, up = (x.double() @ part.decoded(torch.float32).double().T for part in parts.values())
    assert_close(whole.gated(x), gate / (1 + (-gate).exp()) * up)
    residual = torch.zeros(3, 260, dtype=DTYPE, device=DEVICE)
    assert whole.add_to(residual, x) is None
    assert_close(residual, torch.cat([gate, up], 1))


@pytest.mark.parametrize("rows", [3, 70])
def test_integers_in_and_out(rows: int) -> None:
    """Check that inputs are rounded for many rows alone."""
    given = matrix_of(Form("int8", WHOLE), 72, 256, torch.float16)
    x = Values(0).normal(rows, 256, dtype=torch.float16)
    expected = x.double() @ given.decoded(torch.float32).double().T
    plain = Linear(given)(x)
    rounded = Linear(replace(given, activations="int8"))(x)
    assert_close(plain, expected)
    assert torch.equal(plain, rounded) == (rows == 3)
    torch.testing.assert_close(rounded.double(), expected, rtol=0.05, atol=0.05)


def test_groups_that_no_kernel_reads_are_refused_at_start() -> None:
    with pytest.raises(EngineStartError, match="model: int4 in groups of 24 .* 16 columns"):
        Linear(matrix_of(Form("int4", 24), 8, 48, DTYPE))
