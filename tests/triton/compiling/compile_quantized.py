"""Launches of the products of coded matrices, for compile_kernels.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sidestep.kernels.ops.rms_norm import BegunNorm, RmsNorm, Stream
from sidestep.kernels.products import coded_linear
from sidestep.kernels.quantized.coded_matrix import Codes, CodedMatrix
from sidestep.kernels.quantized.device_matrix import DeviceMatrix
from tests.triton.compiling.meta_tensors import TOKENS, bf16, f32, u8

Form = tuple[Codes, tuple[int, int], bool, bool]
"""Codes, groups, and whether there are zeros and minimums."""
WHOLE = 1 << 30
FORMS: tuple[Form, ...] = (
    ("fp8", (128, 128), False, False),
    ("fp8", (1, WHOLE), False, False),
    ("int8", (1, WHOLE), False, False),
    ("int4", (1, 128), False, False),
    ("int4", (1, 128), True, False),
    ("int4", (1, 32), False, True),
    ("fp4", (1, 32), False, False),
    ("nf4", (1, 64), False, False),
)
MAIN_FORMS = FORMS[0], FORMS[4]
ROWS = (1, 64, TOKENS)
VOCABULARY = 128_256


def coded(form: Form, outputs: int, inputs: int) -> DeviceMatrix:
    """Return a matrix without memory."""
    kind, (height, width), zeros, minimums = form
    groups = -(-outputs // height), -(-inputs // width)
    if kind == "fp8":
        codes = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn, device="meta")
    elif kind == "int8":
        codes = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
    else:
        codes = u8(outputs, inputs // 2)
    return DeviceMatrix.of(
        CodedMatrix(
            kind=kind,
            codes=codes,
            scales=f32(*groups),
            group=(height, width),
            dtype=torch.bfloat16,
            zeros=u8(*groups) if zeros else None,
            minimums=f32(*groups) if minimums else None,
        )
    )


def launch_layer(form: Form, rows: int, hidden: int, attended: int, qkv: int, inner: int) -> None:
    """Launch the products of a layer."""
    stream, norm = bf16(rows, hidden), RmsNorm(bf16(hidden), 1e-6)
    begun: BegunNorm | None = None
    for matrix, x in (
        (coded(form, hidden, attended), bf16(rows, attended)),
        (coded(form, hidden, inner), bf16(rows, inner)),
    ):
        begun = coded_linear.add_coded_linear(stream, x, matrix, None, norm)
    given = Stream(stream, norm, begun)
    coded_linear.coded_linear(given, coded(form, qkv, hidden), bf16(qkv))
    coded_linear.coded_gated_linear(given, coded(form, 2 * inner, hidden), None)


def launch_quantized(sizes: tuple[int, int, int, int], forms: Iterable[Form]) -> None:
    """Launch the products of a model. sizes: hidden, attended, QKV and inner size."""
    for form in forms:
        for rows in ROWS:
            launch_layer(form, rows, *sizes)
        head = coded(form, VOCABULARY, sizes[0])
        coded_linear.coded_linear(bf16(1, sizes[0]), head, None, bf16(1, VOCABULARY))
