"""Products of codes of four bits by clusters of processors, against float64."""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.products.coded_linear import coded_gated_linear, coded_linear, streams
from sidestep.kernels.quantized import clustered_codes
from tests.triton.quantized.coded_matrices import WHOLE, Form, matrix_of
from tests.triton.quantized.test_coded_linear import exact, on_device
from tests.triton.support import (
    Values,
    assert_close,
    assert_margins_untouched,
    guarded,
    needs_gpu,
    poisoned,
    unchanged,
)

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)"),
]
FORMS = [
    Form("int4", 128, zeros=True),
    Form("int4", 128),
    Form("int4", 256, zeros=True),
    Form("int4", WHOLE, zeros=True),
    Form("int4", WHOLE),
]
SIZES = [(65, 208, 400), (300, 528, 2064), (256, 4096, 4096)]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_parts_of_tiles(form: Form, dtype: torch.dtype, gated: bool) -> None:
    """Check tiles that clusters share, and rows, columns and groups that fill none."""
    for rows, outputs, inputs in SIZES:
        values = Values(rows)
        buffer = poisoned(rows, inputs + 8, dtype=dtype)
        x = buffer[:, :inputs].copy_(values.normal(rows, inputs, dtype=dtype))
        given = matrix_of(form, outputs, inputs, dtype)
        matrix = on_device(given)
        assert streams(matrix) and clustered_codes.takes(matrix)
        bias = guarded(values.normal(outputs, dtype=dtype)) if rows == 300 else None
        width = outputs // (1 + gated)
        whole = poisoned(rows, width + 8, dtype=dtype)
        out = whole[:, :width]
        with unchanged(x=buffer, words=matrix.words, between=whole[:, width:]):
            clustered_codes.launch(x, matrix, bias, out, gated=gated)
        assert_margins_untouched(whole)
        assert_close(out, exact(x, given, bias, gated), 8)
        # The order of parts is fixed.
        again = torch.empty_like(out)
        clustered_codes.launch(x, matrix, bias, again, gated=gated)
        assert torch.equal(again, out)


@pytest.mark.parametrize("rows", [65, 96, 160, 192, 384, 700, 1023])
def test_any_number_of_rows(rows: int) -> None:
    given = matrix_of(FORMS[0], 1024, 512, torch.bfloat16)
    matrix, x = on_device(given), Values(rows).normal(rows, 512, dtype=torch.bfloat16)
    assert_close(coded_linear(x, matrix, None), exact(x, given), 8)
    found = coded_gated_linear(x, matrix, None)
    assert isinstance(found, torch.Tensor)
    assert_close(found, exact(x, given, gated=True), 8)


@pytest.mark.parametrize("rows", [1024, 2048, 4097, 4700])
def test_rows_in_parts(rows: int) -> None:
    given = matrix_of(FORMS[0], 1024, 512, torch.bfloat16)
    matrix, x = on_device(given), Values(rows).normal(rows, 512, dtype=torch.bfloat16)
    for gated in (False, True):
        out = torch.full((rows, 1024 // (1 + gated)), torch.nan, dtype=x.dtype, device=x.device)
        clustered_codes.launch(x, matrix, None, out, gated=gated)
        assert_close(out, exact(x, given, gated=gated), 8)
