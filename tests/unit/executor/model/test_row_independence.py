"""Row independence on a CPU: a row's bits depend on that row alone.

The tests compare each operation, and whole models, alone and among other rows. All comparisons are
exact. The tests use three threads, because torch cuts tensors by the number of threads; .ci/run
runs them again for a CPU without wide instructions.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sidestep.executor.attention import native_backend
from sidestep.executor.layers import cpu_product
from sidestep.executor.layers.cpu_product import CpuProduct
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import LogprobColumns
from sidestep.kernels.native import library
from sidestep.kernels.ops.clamped_swiglu import clamped_swiglu
from sidestep.kernels.ops.paged_attention import (
    causal_mask,
    decode_attention,
    padded_length,
    prefill_attention,
)
from sidestep.kernels.ops.rms_norm import rms_norm
from sidestep.kernels.ops.routing import Choice, choose_experts
from sidestep.kernels.ops.sampling import mask_top_k_top_p_min_p, sample
from sidestep.kernels.ops.silu_mul import silu_mul
from tests.e2e.models import random_prompts, write_model
from tests.unit.executor.steps import Request, schedule, windows_of
from tests.unit.executor.test_model_runner import VOCAB, make_runner

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = 150
COUNTS = (1, 2, 3, 5, 8, 17, 40, 149)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def check(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare the result of the last rows of x alone with their result among all rows."""
    together = operation(x.clone())
    for count in COUNTS:
        assert torch.equal(operation(x[len(x) - count :].clone()), together[len(x) - count :]), (
            f"{count} rows"
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (188, 60),
        (60, 94),
        (192, 192),
        (257, 60),
        (4096, 192),
        (1000, 520),
        (3072, 1024),
        (96, 2600),
    ],
    ids=str,
)
def test_products(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) / shape[1] ** 0.5).to(dtype)
    x = torch.randn(2 * ROWS, shape[1]).to(dtype)
    check(CpuProduct(weight), x)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(
        CpuProduct(weight)(x[:9]).double(),
        x[:9].double() @ weight.double().T,
        rtol=tolerance,
        atol=tolerance,
    )


def test_products_without_a_layout_that_agrees_are_computed_in_blocks_of_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behave like a CPU whose libraries choose kernels by the number of rows for every layout."""

    def by_number_of_rows(weight: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        return lambda x: (x @ weight.T) * (1 + len(x) * 1e-6), weight

    names = "native_plain", "transposed", "transposed_in_fours", "packed", "packed_in_pieces"
    for name in names:
        monkeypatch.setitem(cpu_product._LAYOUTS, name, by_number_of_rows)
    weight = torch.randn(40, 24)
    monkeypatch.setattr(cpu_product, "_chosen", {})
    product = CpuProduct(weight)
    assert product.kind == "in_blocks"
    x = torch.randn(ROWS, 24)
    check(product, x)
    torch.testing.assert_close(product(x), x @ weight.T, rtol=1e-4, atol=1e-5)
    assert product(x[:0]).shape == (0, 40)


def test_a_layout_that_adds_in_another_order_is_found_in_spite_of_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behave like a CPU whose sums in float32 depend on the rows, which bfloat16 mostly hides."""

    def by_number_of_rows(weight: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            parts = (x.float()[:, None] * weight.float()).split(8, -1)
            sums = [part.sum(-1) for part in (parts if len(x) % 2 else reversed(parts))]
            added: Tensor = reduce(torch.add, sums)
            return added.to(weight.dtype)

        return multiply, weight

    monkeypatch.setitem(cpu_product._LAYOUTS, "plain", by_number_of_rows)
    monkeypatch.setattr(cpu_product, "_candidates", lambda matrix: iter(["plain"]))
    monkeypatch.setattr(cpu_product, "_chosen", {})
    assert CpuProduct(torch.randn(6, 1024).bfloat16()).kind == "in_blocks"


@pytest.mark.parametrize("width", [94, 1000, 3072, 14336])
def test_activations(width: int) -> None:
    for activation in (silu_mul, partial(clamped_swiglu, alpha=1.7, limit=1.0)):
        check(activation, torch.randn(ROWS, 2 * width))


@pytest.mark.parametrize("experts", [5, 72, 256])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_the_choice_of_experts(sigmoid: bool, experts: int) -> None:
    choice = Choice(4, sigmoid=sigmoid, normalised=True)
    logits = torch.randn(ROWS, experts)
    check(lambda x: choose_experts(x, None, choice).weights, logits)
    check(lambda x: choose_experts(x, None, choice).ids, logits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype: torch.dtype) -> None:
    for width in (60, 200, 1023, 4096):
        weight = torch.rand(width).to(dtype)
        norm = partial(rms_norm, weight=weight, eps=1e-6)
        check(norm, torch.randn(ROWS, width).to(dtype))
    weight = torch.rand(24).to(dtype)
    check(lambda x: rms_norm(x[:, :5], weight, 1e-6), torch.randn(ROWS, 9, 24).to(dtype))


@pytest.mark.parametrize("vocab", [257, 4096])
def test_sampling(vocab: int) -> None:
    seeds, positions = torch.arange(ROWS), torch.arange(ROWS) * 3
    heat = torch.arange(ROWS) % 3 / 2

    def of(operation: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: operation(
            x, *(column[ROWS - len(x) :] for column in (heat, seeds, positions))
        )

    check(of(sample), torch.randn(ROWS, vocab))
    check(
        of(lambda x, t, *_: mask_top_k_top_p_min_p(x, (t * 20).long(), 1 - t / 4, t / 99)),
        torch.randn(ROWS, vocab),
    )
    check(lambda x: torch.log_softmax(x, -1), torch.randn(ROWS, vocab))


HEADS = [
    (6, 6, 32),
    (6, 3, 32),
    (6, 1, 20),
    (3, 1, 7),
    (1, 1, 32),
    (8, 1, 64),
    (4, 2, 80),
    (5, 5, 128),
]
SCORES = {
    "plain": (None, False),
    "softcap": (3.0, False),
    "sinks": (None, True),
    "both": (3.0, True),
}
"""Softcap, and whether there are sinks."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("scores", SCORES)
def test_a_query_is_the_same_in_any_chunk_and_as_a_single_token(
    scores: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    length = 600
    q = torch.randn(length, heads, dim).to(dtype)
    kv = torch.randn(padded_length(length), 2 * kv_heads, dim).to(dtype).float()
    softcap, has_sinks = SCORES[scores]
    how = dim**-0.5, softcap, torch.randn(heads) if has_sinks else None

    def chunk(first: int, last: int) -> Tensor:
        """Return the attention of consecutive positions, which have one padded length."""
        keys = padded_length(last)
        mask = causal_mask(first, last - first, keys, 0, torch.device("cpu"))
        return prefill_attention(q[first:last], kv[:keys], mask, *how)

    for start, end in ((0, 64), (64, 128), (128, 256), (256, 512), (512, 600)):
        whole = chunk(start, end)
        for first, last in (
            (start, start + 1),
            (start + 3, start + 5),
            (end - 33, end),
            (start + 1, end - 2),
        ):
            assert torch.equal(chunk(first, last), whole[first - start : last - start]), (
                first,
                last,
            )
        keys = padded_length(end)
        positions = [start, start + 7, end - 1]
        rows = kv[:keys].transpose(0, 1).expand(3, -1, -1, -1)
        masks = torch.stack([causal_mask(p, 1, keys, 0, torch.device("cpu")) for p in positions])[
            :, :, None
        ]
        alone = decode_attention(q[positions[1:2]], rows[:1], masks[1:2], *how)
        together = decode_attention(q[positions], rows, masks, *how)
        assert torch.equal(together[1:2], alone)
        assert torch.equal(together, whole[[p - start for p in positions]])


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("llama-gqa", dtype) for dtype in DTYPES),
        ("llama-mqa-odd-sizes", torch.float32),
        ("qwen3-tied", torch.bfloat16),
        ("mistral-window", torch.float32),
        ("gemma2", torch.float32),
        ("gpt-oss", torch.float32),
        ("qwen3-moe", torch.float32),
        ("glm4-moe", torch.float32),
        ("qwen3-moe", torch.bfloat16),
    ],
    ids=str,
)
def test_a_model_gives_a_request_the_same_bits_alone_and_among_others(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    compare_requests(family, dtype, tmp_path)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Zen is of this family")
def test_attention_that_is_tuned_for_another_cpu_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers join operations by rules of each CPU, which may differ from sum to sum."""

    def tuned(source: str, dtype: torch.dtype) -> ctypes.CDLL:
        monkeypatch.setattr(library, "_FLAGS", (*flags, "-mtune=znver3", "-mno-avx512f"))
        built = library.load.__wrapped__(source)
        monkeypatch.setattr(library, "_FLAGS", flags)
        used.append(built)
        return built

    flags, used = library._FLAGS, list[ctypes.CDLL]()
    make_runner(write_model("llama-gqa", tmp_path))  # builds all other kernels as usual
    monkeypatch.setattr(native_backend, "library_of", tuned)
    compare_requests("llama-gqa", torch.float32, tmp_path)
    assert used or not native_attention()


def native_attention() -> bool:
    """Return whether attention in C can be built here."""
    try:
        library.library_of("attention.c", torch.float32)
    except library.NoLibraryError:
        return False
    return True


def compare_requests(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Compare what requests are given alone, together and in chunks."""
    runner = make_runner(write_model(family, tmp_path), dtype=str(dtype).removeprefix("torch."))
    prompts = random_prompts(14, VOCAB, longest=140)

    def bits(chosen: Sequence[int], budget: int) -> list[list[bytes]]:
        requests = [
            Request(
                prompts[i], 6, temperature=[0.0, 1.0][i % 2], seed=i, controls=Controls(logprobs=20)
            )
            for i in chosen
        ]
        seen: dict[int, list[bytes]] = {id(request): [] for request in requests}
        for step, sampling in schedule(requests, budget, 16, windows_of(runner)):
            output = runner.execute(step).wait()
            if not sampling:
                continue
            columns = LogprobColumns.unpack(output.logprobs)
            ends = columns.sizes.cumsum().tolist()
            for request, token, first, last in zip(
                sampling, output.token_ids.tolist(), [0, *ends], ends, strict=False
            ):
                request.output.append(token)
                seen[id(request)].append(
                    columns.token_ids[first:last].tobytes() + columns.logprobs[first:last].tobytes()
                )
        return [seen[id(request)] for request in requests]

    everybody = range(len(prompts))
    alone = [bits([i], 512)[0] for i in everybody]
    assert bits(everybody, 512) == alone
    assert bits(everybody, 37) == alone, "in chunks"
