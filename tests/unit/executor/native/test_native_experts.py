"""Experts by kernels in C: right for each form, and a token's bits depend on that token alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sidestep.executor.layers.experts import native_experts
from sidestep.executor.layers.experts.native_experts import NativeExperts
from sidestep.executor.layers.layouts import native_matrices, rounding_layouts
from sidestep.executor.layers.layouts.native_matrices import Kernel, kernel_of
from sidestep.executor.layers.layouts.rounding_layouts import MOST_ERROR
from sidestep.ipc.model.layer_spec import Activation, ClampedSwiglu, ExpertsSpec
from sidestep.kernels.experts.common.expert_matrix import BLOCK, ExpertMatrix
from sidestep.kernels.native.experts import CODED, SOURCE, sort_pairs
from sidestep.kernels.native.matrices import GROUP
from sidestep.kernels.ops.routing import Routed
from sidestep.kernels.quantized.coded_matrix import CodedMatrix, pack_halves

EXPERTS, CHOSEN = 7, 3
HIDDEN, WIDTH = 96, 64
F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True, params=["as wide as they are", "of 256 bits"])
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use vectors of both widths, and matrices of any size."""
    monkeypatch.setattr(rounding_layouts, "_FEWEST_NUMBERS", 1)
    # As if oneDNN had no products of 16 bits, so that bfloat16 is computed here too.
    monkeypatch.setattr(native_experts, "packed_by_onednn", lambda _: None)
    if request.param == "of 256 bits":

        def narrow(source: str, name: str, dtype: torch.dtype, *given: str) -> Kernel | None:
            return kernel_of(source, name, dtype, "NARROW", *given)

        monkeypatch.setattr(native_experts, "kernel_of", narrow)


def plain(rows: int, columns: int, dtype: torch.dtype) -> ExpertMatrix:
    return ExpertMatrix(torch.randn(rows, columns).to(dtype))


def with_bias(rows: int, columns: int, dtype: torch.dtype) -> ExpertMatrix:
    return ExpertMatrix(torch.randn(rows, columns).to(dtype), torch.randn(rows).to(dtype))


def mxfp4(rows: int, columns: int, dtype: torch.dtype) -> ExpertMatrix:
    """Return a matrix of MXFP4 with a bias, and with scales that are far apart."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(118, 128, (rows, columns // BLOCK), dtype=torch.uint8)
    return ExpertMatrix(codes, torch.randn(rows).to(dtype), scales)


def int8(rows: int, columns: int, dtype: torch.dtype) -> CodedMatrix:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1) / 64
    return CodedMatrix(kind="int8", codes=codes, scales=scales, group=(1, columns), dtype=dtype)


def int4(rows: int, columns: int, dtype: torch.dtype) -> CodedMatrix:
    """Return a matrix with zeros, those of 0 and 15 among them."""
    zeros = torch.randint(0, 16, (rows, columns // 32), dtype=torch.uint8)
    zeros[0, :2] = torch.tensor([0, 15])
    return CodedMatrix(
        kind="int4",
        codes=pack_halves(torch.randint(0, 16, (rows, columns), dtype=torch.uint8)),
        scales=torch.rand(rows, columns // 32) / 4,
        group=(1, 32),
        dtype=dtype,
        zeros=zeros,
    )


def nf4(rows: int, columns: int, dtype: torch.dtype) -> CodedMatrix:
    return replace(int4(rows, columns, dtype), kind="nf4", zeros=None)


def fp8(rows: int, columns: int, dtype: torch.dtype) -> CodedMatrix:
    codes = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 64), -(-columns // 64)) + 0.5
    return CodedMatrix(kind="fp8", codes=codes, scales=scales, group=(64, 64), dtype=dtype)


Form = Callable[[int, int, torch.dtype], ExpertMatrix | CodedMatrix]
FORMS: dict[str, Form] = {
    form.__name__: form for form in (plain, with_bias, mxfp4, int8, int4, nf4, fp8)
}


class Stored:
    """Experts of one form, which are made when they are loaded."""

    def __init__(
        self,
        form: str,
        dtype: torch.dtype,
        activation: Activation | ClampedSwiglu = "silu",
    ) -> None:
        torch.manual_seed(0)
        self.spec = ExpertsSpec(
            num_experts=EXPERTS, num_chosen=CHOSEN, width=WIDTH, activation=activation
        )
        self.experts = range(EXPERTS)
        make = FORMS[form]
        self.of_gate_up = [make(2 * WIDTH, HIDDEN, dtype) for _ in self.experts]
        self.of_down = [make(HIDDEN, WIDTH, dtype) for _ in self.experts]

    def gate_up(self, expert: int) -> ExpertMatrix | CodedMatrix:
        return self.of_gate_up[expert]

    def down(self, expert: int) -> ExpertMatrix | CodedMatrix:
        return self.of_down[expert]


def loaded(stored: Stored, dtype: torch.dtype) -> NativeExperts:
    made = NativeExperts.of(stored, dtype)
    if made is None:
        pytest.skip("there is no compiler, or the CPU has no such instructions")
    return made


def numbers(given: ExpertMatrix | CodedMatrix) -> tuple[Tensor, Tensor | float]:
    """Return a matrix and its bias in float64."""
    if isinstance(given, CodedMatrix):
        return given.decoded(torch.float32).double(), 0.0
    bias = 0.0 if given.bias is None else given.bias.double()
    return given.decoded(torch.float32).values.double(), bias


def activated(both: Tensor, activation: Activation | ClampedSwiglu) -> Tensor:
    gate, up = both.chunk(2, -1)
    if isinstance(activation, ClampedSwiglu):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * torch.sigmoid(activation.alpha * gate) * (up + 1)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return torch.nn.functional.silu(gate) * up


def expected(stored: Stored, x: Tensor, routed: Routed) -> Tensor:
    """Return the weighted sums in float64."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for t, (ids, weights) in enumerate(zip(routed.ids.tolist(), routed.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                (first, bias), (second, other) = map(
                    numbers, (stored.gate_up(expert), stored.down(expert))
                )
                inner = activated(x[t].double() @ first.T + bias, stored.spec.activation)
                out[t] += weight.double() * (inner @ second.T + other)
    return out


def chosen(tokens: int) -> Routed:
    """Return experts of tokens; one expert has none of them."""
    ids = torch.stack([torch.randperm(EXPERTS - 1)[:CHOSEN] for _ in range(tokens)])
    return Routed(ids.int(), torch.rand(tokens, CHOSEN))


def poisoned(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.full((tokens, HIDDEN), torch.nan, dtype=dtype)


ACTIVATIONS: list[Activation | ClampedSwiglu] = [
    "silu",
    "gelu_tanh",
    ClampedSwiglu(alpha=1.7, limit=3.0),
]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_it_is_the_weighted_sum_of_the_experts(
    activation: Activation | ClampedSwiglu, form: str, dtype: torch.dtype
) -> None:
    stored = Stored(form, dtype, activation)
    experts = loaded(stored, dtype)
    x = torch.randn(20, HIDDEN).to(dtype)
    routed = chosen(20)
    out = poisoned(20, dtype)
    experts(x, routed, out, add=False)
    wanted = expected(stored, x, routed)
    tolerance = max(2e-6, 2 * torch.finfo(dtype).eps)
    if form not in ("plain", "with_bias"):
        tolerance += 0.02  # inputs in 8 bits are off by at most 1/254 of their group's largest
    if form == "fp8":
        tolerance += 2 * MOST_ERROR  # both matrices are rounded again
    assert (out.double() - wanted).norm() <= tolerance * wanted.norm()
    stream = torch.randn(20, HIDDEN).to(dtype)
    added = stream.clone()
    experts(x, routed, added, add=True)
    both = stream.double() + wanted
    assert (added.double() - both).norm() <= tolerance * both.norm()


@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_products_of_whole_numbers_are_exact(form: str) -> None:
    """Inputs of at most 127 whose largest is 127 are not rounded, nor are scales of 2 ** n."""
    stored = Stored(form, F32)
    experts, routed = loaded(stored, F32), chosen(30)
    x = torch.randint(-127, 128, (30, HIDDEN)).float()
    x[:, ::GROUP] = 127
    pairs = sort_pairs(routed.ids, EXPERTS)
    made = experts._gate_up.products(x, pairs, of="tokens")
    order = sorted((e, t) for t, row in enumerate(routed.ids.tolist()) for e in row)
    for (expert, token), result in zip(order, made, strict=True):
        matrix, bias = numbers(stored.gate_up(expert))
        wanted, size = x[token].double() @ matrix.T, x[token].double().norm() * matrix.norm(dim=1)
        assert ((result.double() - wanted - bias).abs() <= 1e-6 * size + 1e-6).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("form", ["plain", "mxfp4", "int8", "int4"])
def test_a_token_has_the_same_bits_alone_and_among_others(form: str, dtype: torch.dtype) -> None:
    experts = loaded(Stored(form, dtype), dtype)
    x, routed, threads = torch.randn(90, HIDDEN).to(dtype), chosen(90), torch.get_num_threads()
    together = poisoned(90, dtype)
    experts(x, routed, together, add=False)
    try:
        for count in (1, 2, 3, 5, 8, 9, 31, 64, 89):
            torch.set_num_threads(1 + count % 3)
            part, out = slice(90 - count, 90), poisoned(count, dtype)
            own = Routed(routed.ids[part].clone(), routed.weights[part].clone())
            experts(x[part], own, out, add=False)
            assert torch.equal(out, together[part]), f"{count} tokens"
    finally:
        torch.set_num_threads(threads)


def test_a_large_step_is_computed_in_parts_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = loaded(Stored("plain", F32), F32)
    x, routed = torch.randn(41, HIDDEN), chosen(41)
    outs = []
    for most in (10_000, 4 * CHOSEN, 1):
        monkeypatch.setattr(native_experts, "_MOST_PAIRS", most)
        outs.append(poisoned(41, F32))
        experts(x, routed, outs[-1], add=False)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("form", ["plain", "int4"])
def test_experts_of_other_ranks_give_nothing(form: str) -> None:
    stored = Stored(form, F32)
    experts, x, routed = loaded(stored, F32), torch.randn(6, HIDDEN), chosen(6)
    routed.ids[0] = -1
    routed.ids[1:, 1] = -1
    out = poisoned(6, F32)
    experts(x, routed, out, add=False)
    assert not out[0].any()
    wanted = expected(stored, x, routed)
    assert (out.double() - wanted).norm() <= 0.02 * wanted.norm()
    routed.ids[:] = -1
    experts(x, routed, out, add=False)
    assert not out.any()


def test_a_step_without_tokens() -> None:
    experts = loaded(Stored("plain", F32), F32)
    out = torch.empty(0, HIDDEN)
    experts(torch.empty(0, HIDDEN), chosen(1)._replace(ids=torch.empty(0, 3).int()), out, add=True)


def test_numbers_that_are_not_finite_stay_with_their_token() -> None:
    for form in ("plain", "int4", "mxfp4"):
        experts = loaded(Stored(form, F32), F32)
        x, routed, out = torch.randn(9, HIDDEN), chosen(9), poisoned(9, F32)
        x[4, 3] = torch.nan
        experts(x, routed, out, add=False)
        assert not out[4].isfinite().any()
        assert out[:4].isfinite().all() and out[5:].isfinite().all()


def test_fp4_of_a_file_keeps_four_bits() -> None:
    stored = Stored("mxfp4", F32)
    stack = loaded(stored, F32)._gate_up
    if kernel_of(SOURCE, "products", F32, CODED) is None:
        pytest.skip("this CPU multiplies decoded numbers")
    nbytes = sum(part.nbytes for part in stack.kept) / EXPERTS / (2 * WIDTH * HIDDEN)
    # Beside the codes there are scales of half precision, and for each row a factor and a bias.
    assert 0.5 + 2 / BLOCK <= nbytes <= 0.5 + 2 / BLOCK + 10 / HIDDEN


def test_experts_of_a_file_in_16_bits_keep_them_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = Stored("plain", F32)
    for one in (stored.of_gate_up, stored.of_down):
        one[1:] = [ExpertMatrix(numbers(given)[0].bfloat16().float()) for given in one[1:]]
    narrow = loaded(stored, F32)
    kept = [part.dtype for part in narrow._down.kept]
    assert kept == [F32, *[torch.bfloat16] * (EXPERTS - 1)]
    monkeypatch.setattr(native_matrices, "exact_type", lambda given: given.dtype)
    x, routed = torch.randn(40, HIDDEN), chosen(40)
    made, expected = torch.empty(40, HIDDEN), torch.empty(40, HIDDEN)
    narrow(x, routed, made, add=False)
    loaded(stored, F32)(x, routed, expected, add=False)
    assert torch.equal(made, expected)


def test_experts_of_both_kinds_are_left_to_others() -> None:
    stored = Stored("int8", F32)
    stored.of_down[3] = plain(HIDDEN, WIDTH, F32)
    assert NativeExperts.of(stored, F32) is None


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_codes_that_would_be_decoded_are_left_to_smaller_layouts(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behave like a CPU without products of 8-bit numbers, where float16 takes half the memory."""

    def plain_alone(source: str, name: str, dtype: torch.dtype, *given: str) -> Kernel | None:
        return None if CODED in given else kernel_of(source, name, dtype, *given)

    monkeypatch.setattr(native_experts, "kernel_of", plain_alone)
    assert NativeExperts.of(Stored(form, F32), F32) is None


def test_another_type_has_no_such_experts() -> None:
    assert NativeExperts.of(Stored("plain", torch.float16), torch.float16) is None
