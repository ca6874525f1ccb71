"""Launches of the products of coded matrices, for compile_kernels.py.

As a program, print in JSON two lists of the kernels that a layer of small matrices needs: for
tensors without memory, and for tensors with memory, on the CPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton

from sidestep.executor.layers.coded_gpu_matrix import CodedGpuMatrix
from sidestep.kernels.compiling import CompilerThreads, compile_for, compiling_only
from sidestep.kernels.gpu import Gpu
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm, Stream
from sidestep.kernels.quantized.coded_matrix import ROUNDED, CodedMatrix, Codes, Rounded
from tests.triton.compiling.meta_tensors import TOKENS, bf16

WHOLE = 1 << 30
"""Columns of a group that has all of them."""


class Form(NamedTuple):
    """A form of matrices."""

    kind: Codes
    group: tuple[int, int] = (1, WHOLE)
    zeros: bool = False
    minimums: bool = False
    activations: Rounded | None = None


FORMS = (
    Form("fp8", (128, 128), activations="fp8"),
    Form("int4", (1, 128), zeros=True),
    Form("fp8", activations="fp8"),
    Form("int8", activations="int8"),
    Form("fp8", (128, 128)),
    Form("int8"),
    Form("int4", (1, 128)),
    Form("int4", (1, 32), minimums=True),
    Form("fp4", (1, 32)),
    Form("nf4", (1, 64)),
)
MAIN_FORMS = FORMS[:3]
ROWS = (1, 64, 100, TOKENS)
VOCABULARY = 128_256
_SMALL = 2048, 4096, 5120, 768
"""Sizes of a layer whose small products of one row have a kernel of their own: Qwen3-30B-A3B's
attention, and an expert."""


def coded(form: Form, outputs: int, inputs: int, device: str = "meta") -> CodedMatrix:
    """Return a matrix of zeros, or without memory."""
    kind, (height, width), zeros, minimums, activations = form
    height, width = min(height, outputs), min(width, inputs)
    groups = -(-outputs // height), -(-inputs // width)
    packed = 1 if kind in ("fp8", "int8") else 2
    codes = torch.zeros(outputs, inputs // packed, dtype=torch.uint8, device=device)
    given = torch.zeros(groups, dtype=torch.float32, device=device)
    return CodedMatrix(
        kind=kind,
        codes=codes.view(ROUNDED[kind]) if kind == "fp8" or kind == "int8" else codes,
        scales=given,
        group=(height, width),
        dtype=torch.bfloat16,
        zeros=given.to(torch.uint8) if zeros else None,
        minimums=given if minimums else None,
        activations=activations,
    )


def launch_layer(form: Form, rows: int, hidden: int, attended: int, qkv: int, inner: int) -> None:
    """Launch the products of a layer."""
    stream, norm = bf16(rows, hidden), RmsNorm(bf16(hidden), 1e-6)
    begun: Begun | None = None
    for matrix, x in (
        (coded(form, hidden, attended), bf16(rows, attended)),
        (coded(form, hidden, inner), bf16(rows, inner)),
    ):
        begun = CodedGpuMatrix(matrix, None).add_to(stream, x, norm)
    given = Stream(stream, norm, begun)
    CodedGpuMatrix(coded(form, qkv, hidden), bf16(qkv))(given)
    CodedGpuMatrix(coded(form, 2 * inner, hidden), None).gated(given)


def launch_quantized(sizes: tuple[int, int, int, int], forms: Iterable[Form]) -> None:
    """Launch the products of a model. sizes: hidden, attended, QKV and inner size."""
    for form in forms:
        for rows in ROWS:
            launch_layer(form, rows, *sizes)
        launch_layer(form, 1, *_SMALL)
        head = CodedGpuMatrix(coded(form, VOCABULARY, sizes[0]), None)
        head(bf16(1, sizes[0]), bf16(1, VOCABULARY))


def keys(device: str) -> list[str]:
    """Return the kernels that products on a device need."""
    found: set[str] = set()

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # enough: do not compile

    triton.knobs.runtime.jit_cache_hook = note
    compile_for(Gpu(90, 132), device)
    with CompilerThreads(1) as threads, compiling_only(threads):
        for form, rows in itertools.product(FORMS, (1, 5, 40, 100)):
            stream = torch.zeros(rows, 192, dtype=torch.bfloat16, device=device)
            norm = RmsNorm(stream[0], 1e-6)
            begun = CodedGpuMatrix(coded(form, 192, 160, device), None).add_to(
                stream, stream[:, :160], norm
            )
            up = CodedGpuMatrix(coded(form, 320, 192, device), None)
            up.gated(Stream(stream, norm, begun))
            up(stream, stream.new_zeros(rows, 320))
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps([keys(device) for device in ("meta", "cpu")]))
