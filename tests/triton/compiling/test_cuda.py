"""Kernels in CUDA C++ compile for Hopper without a GPU, fit it, and are kept on disk."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton import knobs

from sidestep.kernels.attention.hopper import decode_hopper, prefill_hopper, roped_product
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.cuda import compiler
from sidestep.kernels.cuda.compiler import CudaCompileError, compiles, cubin
from sidestep.kernels.experts import clustered_pairs, coded_row, row_form, streamed_pairs
from sidestep.kernels.experts.clustered_pairs import Form
from sidestep.kernels.experts.common import sorted_pairs_hopper
from sidestep.kernels.products.hopper import gated_hopper
from sidestep.kernels.quantized import clustered_codes

pytestmark = pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")
FORMS = [
    Form(torch.bfloat16, eight, row_scales, bias, 8, gated, activation if gated else SILU)
    for SILU in [(False, None, None)]
    for eight, row_scales, bias, gated, activation in itertools.product(
        (False, True), (False, True), (False, True), (False, True), (SILU, (False, 1.702, 7.0))
    )
    if eight or not row_scales
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))


@pytest.fixture
def stack_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Path], int]:
    """Return a function from a test's one file of kernels to the bytes of its threads' stack.

    Registers that do not suffice make a loop slower, and the compiler only says so.
    """
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "--ptxas-options=-v"))
    caplog.set_level(logging.DEBUG, compiler.__name__)

    def stack_of(file: Path) -> int:
        assert file.read_bytes()[:4] == b"\x7fELF"
        assert "serialized" not in caplog.text, "products would wait for one another"
        return max(map(int, re.findall(r"(\d+) bytes stack frame", caplog.text)))

    return stack_of


@pytest.mark.parametrize("form", sorted(set(FORMS), key=str), ids=str)
def test_threads_have_enough_registers(form: Form, stack_of: Callable[[Path], int]) -> None:
    # Biases beside scales of rows are rare in files.
    most = 192 if form.row_scales and form.bias else 64
    assert stack_of(clustered_pairs.compiled(form)) <= most


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", clustered_codes._TOKENS)
def test_codes_have_enough_registers(
    tokens: int, group: int, dtype: torch.dtype, gated: bool, stack_of: Callable[[Path], int]
) -> None:
    form = clustered_codes.Form(dtype, tokens, group, True, gated, True)
    assert stack_of(clustered_codes.compiled(form)) <= 16


PROMPTS = ((128, 1), (128, 4), (128, 7), (64, 8), (64, 1))
DECODES = ((128, 1), (128, 8), (128, 16), (64, 8), (256, 8))
"""Sizes of heads, and query heads of a KV head."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("largest", "window", "sinks"), [(True, 0, False), (False, 4096, False), (True, 128, True)]
)
@pytest.mark.parametrize(
    ("of_prompts", "dim", "group"),
    [(True, *heads) for heads in PROMPTS] + [(False, *heads) for heads in DECODES],
)
def test_attention_has_enough_registers(
    of_prompts: bool,
    dim: int,
    group: int,
    largest: bool,
    window: int,
    sinks: bool,
    dtype: torch.dtype,
    stack_of: Callable[[Path], int],
) -> None:
    heads, rest = (dtype, dim, group), (window, sinks)
    if of_prompts:
        prompt = prefill_hopper.Form(*heads, prefill_hopper.KEYS if largest else 16, *rest)
        file = prefill_hopper.compiled(prompt)
    else:
        box = decode_hopper.TILE if largest else 16
        projected = group <= decode_hopper._MOST_TURNED
        form = decode_hopper.Form(
            *heads, box, *rest, next_early=True, read_once=True, projected=projected, norms=True
        )
        file = decode_hopper.compiled(form)
    assert stack_of(file) == 0


@pytest.mark.parametrize("pairs", [16, 32, 48, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_streams_of_experts_have_enough_registers(
    pairs: int, bias: bool, stack_of: Callable[[Path], int]
) -> None:
    form = streamed_pairs.Form(torch.bfloat16, pairs, bias, 8, (False, None, None))
    assert stack_of(streamed_pairs.compiled(form)) <= 64


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("kind", "group", "sizes"),
    [
        ("fp8", 0, (128, 8, 2048, 768)),
        ("fp8", 128, (128, 8, 2048, 768)),
        ("int8", 0, (512, 10, 2048, 512)),
        ("int4", 128, (60, 4, 2048, 1408)),
        ("mxfp4", 128, (32, 4, 2880, 2880)),
    ],
)
def test_rows_of_coded_experts_have_enough_registers(
    kind: str,
    group: int,
    sizes: tuple[int, int, int, int],
    normalised: bool,
    stack_of: Callable[[Path], int],
) -> None:
    experts, chosen, width, inner = sizes
    clamped = kind == "mxfp4"
    form = row_form.Form(
        torch.bfloat16,
        kind,
        kind == "int4",
        chosen,
        row_form.Matrix(width, group, 1, clamped),
        row_form.Matrix(inner, group, 1, clamped),
        shares=1,
        blocks=132,
        activation=(False, 1.702, 7.0) if clamped else (False, None, None),
        choosing=row_form.Choosing(1, experts, experts, normalised, experts > 128, experts > 128),
        ending=row_form.Ending(True, True, False),
    )
    assert form.fits
    assert stack_of(coded_row.compiled(form)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gated_product_has_enough_registers(
    dtype: torch.dtype, stack_of: Callable[[Path], int]
) -> None:
    assert stack_of(gated_hopper.compiled(dtype)) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dim", roped_product._DIMS)
def test_roped_products_have_enough_registers(
    dim: int, norms: bool, bias: bool, dtype: torch.dtype, stack_of: Callable[[Path], int]
) -> None:
    form = roped_product.Form(dtype, dim, norms, bias)
    assert stack_of(roped_product.compiled(form)) <= (192 if bias else 0)


def test_sorts_of_pairs_have_enough_registers(stack_of: Callable[[Path], int]) -> None:
    assert stack_of(sorted_pairs_hopper.compiled(sorted_pairs_hopper.Form("place_pairs", 0))) == 0


def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[0]
    first = clustered_pairs.compiled(form)
    assert list((tmp_path / "cuda").iterdir()) == [first]
    assert first.suffix == ".cubin"
    monkeypatch.setattr(compiler, "_compile", None)
    assert clustered_pairs.compiled(form) == first


def test_the_library_writes_into_no_object_of_python() -> None:
    """Python has one object for each single byte; what is written into it is read everywhere."""
    clustered_pairs.compiled(FORMS[0])  # the compiler says nothing of it: a text of one byte
    every = bytes(range(256))
    assert [every[i : i + 1][0] for i in range(256)] == list(every)


def test_an_executor_compiles_each_form_once(tmp_path: Path) -> None:
    x = torch.empty(0, device="meta")
    with CompilerThreads(2) as threads, compiling_only(threads):
        for form in (FORMS[0], FORMS[-1], FORMS[0]):
            assert clustered_pairs._KERNELS.to_launch(form, x) is None
    assert len(list((tmp_path / "cuda").iterdir())) == 2


def test_the_error_of_an_executor_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clustered_pairs._KERNELS, "_compiled", lambda form: cubin("none", {}, {}))
    x = torch.empty(0, device="meta")
    with (
        pytest.raises(FileNotFoundError),
        CompilerThreads(1) as threads,
        compiling_only(threads),
    ):
        clustered_pairs._KERNELS.to_launch(FORMS[0], x)


def test_an_error_says_what_the_compiler_says() -> None:
    with pytest.raises(CudaCompileError, match=r"expert_products\.cu.*identifier"):
        cubin("expert_products", {}, {"wgmma.cuh": ""})
