"""The kernels of a mixture of experts against float64, and against the reference of the choice."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.common.expert_matrix import BLOCK, ExpertMatrix, decode_mxfp4
from sidestep.kernels.experts.common.sorted_pairs_triton import sort_pairs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.expert_codes_triton import mxfp4_numbers
from sidestep.kernels.experts.experts_triton import few_pairs, multiply_experts
from sidestep.kernels.experts.routing_triton import route, route_stream
from sidestep.kernels.ops.rms_norm import BegunNorm, NoNorm, RmsNorm, Stream, WholeNorm
from sidestep.kernels.ops.routing import Choice, Joined, Routed, Undecided, choose_experts
from tests.triton.quantized.coded_matrices import guarded_codes
from tests.triton.support import (
    DEVICE,
    DTYPE,
    DTYPES,
    INTERPRETED,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    int32,
    poisoned,
    unchanged,
)

SUPPORTED = DTYPES if INTERPRETED else DTYPES[1:]
"""Types of the tests. On a GPU the tensor cores would round float32 to 10 bits."""


def routing(values: Values, rows: int, chosen: int, experts: int) -> Routed:
    ids = [values.different(chosen, experts) for _ in range(rows)]
    return Routed(int32(ids), values.normal(rows, chosen, dtype=torch.float32))


def exact(
    x: Tensor,
    routed: Routed,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    gelu: bool = False,
    clamped: tuple[float, float] | None = None,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (ids, weights) in enumerate(zip(*routed, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            gate, up = product(gate_up, expert, x[token].double()).chunk(2)
            if clamped is not None:
                alpha, limit = clamped
                gate = gate.clamp(max=limit)
                activated, up = gate * (gate * alpha).sigmoid(), up.clamp(-limit, limit) + 1
            elif gelu:
                activated = torch.nn.functional.gelu(gate, approximate="tanh")
            else:
                activated = gate / (1 + (-gate).exp())
            out[token] += weight * product(down, expert, activated * up)
    return out


def product(matrix: ExpertMatrix, expert: int, x: Tensor) -> Tensor:
    values, bias, _ = matrix.decoded(torch.float32)
    made = values[expert].double() @ x
    return made if bias is None else made + bias[expert].double()


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    ("rows", "chosen", "experts", "width", "inner"),
    [(1, 2, 4, 48, 36), (5, 3, 7, 130, 17), (70, 2, 3, 33, 65), (9, 1, 40, 16, 128)]
    + [(3, 8, 16, 76, 200), (1, 6, 9, 20, 72), (1, 9, 20, 40, 520), (3, 11, 24, 44, 96)],
)
def test_any_size(
    rows: int, chosen: int, experts: int, width: int, inner: int, add: bool, few: bool
) -> None:
    for dtype in SUPPORTED if rows == 5 else SUPPORTED[:1]:
        values = Values(rows + width)
        x = guarded(values.normal(rows, width, dtype=dtype))
        gate_up = guarded(values.normal(experts, 2 * inner, width, dtype=dtype, scale=width**-0.5))
        down = guarded(values.normal(experts, width, inner, dtype=dtype, scale=inner**-0.5))
        before = values.normal(rows, width, dtype=dtype)
        routed, out = routing(values, rows, chosen, experts), guarded(before)
        gelu, matrices = rows == 5, (ExpertMatrix(gate_up), ExpertMatrix(down))
        with unchanged(x=x, gate_up=gate_up, down=down), PoisonedAllocations():
            multiply_experts(x, routed, *matrices, out, add=add, gelu=gelu, few=few)
        wanted = exact(x, routed, *matrices, gelu=gelu) + (before.double() if add else 0)
        assert_close(out, wanted, ulps=16)


def packed(values: Values, *shape: int) -> ExpertMatrix:
    """Return random matrices of MXFP4 with all codes, whose scales are around 1 / 8."""
    *outer, columns = shape
    codes = torch.tensor(values.integers(0, 256, torch.Size(shape).numel() // 2), dtype=torch.uint8)
    scales = torch.tensor(values.integers(120, 126, codes.numel() // 16), dtype=torch.uint8)
    return ExpertMatrix(
        codes.view(*outer, columns // 2).to(DEVICE),
        scales=scales.view(*outer, columns // BLOCK).to(DEVICE),
    )


def codes_of(matrix: ExpertMatrix) -> ExpertCodes:
    """Return matrices of MXFP4 as the kernels read them."""
    parts = zip(*(part for part in matrix if part is not None), strict=True)
    biased = matrix.bias is not None
    return guarded_codes(
        [
            ExpertCodes.of_mxfp4(ExpertMatrix(part[0], part[1] if biased else None, part[-1]))
            for part in parts
        ]
    )


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("rows", "chosen", "experts", "width", "inner"), [(3, 2, 5, 160, 32), (70, 2, 3, 64, 96)]
)
def test_experts_of_gpt_oss(
    rows: int, chosen: int, experts: int, width: int, inner: int, is_packed: bool, few: bool
) -> None:
    """Cover biases, the activation and its limits, and packed matrices; also without a bias."""
    for dtype in SUPPORTED if rows == 3 else SUPPORTED[:1]:
        values = Values(rows)
        x = guarded(values.normal(rows, width, dtype=dtype))
        shapes = (experts, 2 * inner, width), (experts, width, inner)
        gate_up, down = (
            packed(values, *shape)
            if is_packed
            else ExpertMatrix(guarded(values.normal(*shape, dtype=dtype, scale=0.2)))
            for shape in shapes
        )
        gate_up = gate_up._replace(bias=guarded(values.normal(*shapes[0][:2], dtype=dtype)))
        if rows == 3:  # ranks but the first add no bias
            down = down._replace(bias=guarded(values.normal(*shapes[1][:2], dtype=dtype)))
        routed, out = routing(values, rows, chosen, experts), guarded(x)
        clamped = 1.702, 1.5
        given: list[ExpertMatrix | ExpertCodes] = [gate_up, down]
        if is_packed:
            given = [codes_of(gate_up), codes_of(down)]
        with unchanged(x=x), PoisonedAllocations():
            multiply_experts(
                x, routed, given[0], given[1], out, add=False, clamped=clamped, few=few
            )
        # The unit is that of the largest number, as in sums of products of all sizes.
        wanted = exact(x, routed, gate_up, down, clamped=clamped)
        scale = max(1.0, float(wanted.abs().max()))
        assert_close(out / scale, wanted / scale, ulps=16, float32_ulps=32)


@triton.jit  # type: ignore[untyped-decorator]  # Triton's language has no Python types
def _store_numbers(words, scales, out, N: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    rows, columns = tl.arange(0, N), tl.arange(0, 128)
    tile = tl.load(words + rows[:, None] * 16 + tl.arange(0, 16)[None, :])
    numbers = mxfp4_numbers(tile, tl.load(scales + rows), tl.float32, N, 128, False)
    tl.store(out + rows[:, None] * 128 + columns[None, :], numbers)


def test_all_numbers_of_mxfp4_are_exact() -> None:
    """Cover every code with every scale up to 2^64; larger ones count as that."""
    half = torch.arange(16, dtype=torch.uint8)
    codes = (half | (15 - half) << 4).tile(64, 4).to(DEVICE)
    scales = torch.arange(64 * 4).to(torch.uint8).view(64, 4).to(DEVICE)
    packed = ExpertCodes.of_mxfp4(ExpertMatrix(codes, None, scales))
    out = torch.zeros(64, 128, device=DEVICE)
    _store_numbers[(1,)](packed.words, packed.scales, out, 64)
    assert torch.equal(out, decode_mxfp4(codes, scales.clamp(max=127 + 64)))


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("biased", "inner"), [(True, 33), (False, 33), (True, 40)])
def test_of_several_ranks_each_multiplies_the_pairs_of_its_own_experts(
    biased: bool, inner: int, few: bool
) -> None:
    rows, chosen, experts, width = 90, 3, 6, 40
    values = Values(11)
    x = values.normal(rows, width, dtype=DTYPE)
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    gate_up, down = (
        ExpertMatrix(
            values.normal(*shape, dtype=DTYPE, scale=shape[2] ** -0.5),
            values.normal(*shape[:2], dtype=DTYPE) if biased else None,
        )
        for shape in shapes
    )
    routed = routing(values, rows, chosen, experts)
    routed.ids[:5] = int32([[5, 3, 4]])  # nothing for the first rank
    for own in (range(2), range(2, 6)):
        local, out = routed.on_rank(own), guarded(values.normal(rows, width, dtype=DTYPE))
        mine = [
            ExpertMatrix(
                guarded(matrix.values[own.start : own.stop]),
                None if matrix.bias is None else guarded(matrix.bias[own.start : own.stop]),
            )
            for matrix in (gate_up, down)
        ]
        with PoisonedAllocations():
            multiply_experts(x, local, mine[0], mine[1], out, add=False, few=few, some=True)
        weights = routed.weights.masked_fill(local.ids < 0, 0)
        assert_close(out, exact(x, Routed(routed.ids, weights), gate_up, down), ulps=16)


@pytest.mark.parametrize(("inner", "chosen"), [(30, 2), (136, 2), (136, 6), (328, 9)])
@pytest.mark.parametrize("few", [True, False])
def test_a_token_does_not_depend_on_those_beside_it(few: bool, inner: int, chosen: int) -> None:
    values, experts = Values(4), chosen + 3
    x, routed = values.normal(9, 40, dtype=DTYPE), routing(values, 9, chosen, experts)
    gate_up = ExpertMatrix(values.normal(experts, 2 * inner, 40, dtype=DTYPE))
    down = ExpertMatrix(values.normal(experts, 40, inner, dtype=DTYPE))

    def run(rows: int) -> Tensor:
        out = torch.zeros(rows, 40, dtype=DTYPE, device=DEVICE)
        own = Routed(routed.ids[-rows:].contiguous(), routed.weights[-rows:].contiguous())
        multiply_experts(x[-rows:].contiguous(), own, gate_up, down, out, add=False, few=few)
        return out

    together = run(9)
    assert all(torch.equal(run(rows), together[-rows:]) for rows in (1, 2, 8))


@pytest.mark.parametrize("width", [40, 128])
def test_few_pairs_begin_the_next_norm(width: int) -> None:
    rows, chosen, experts, inner, values = 5, 3, 7, 24, Values(width)
    x, before = (values.normal(rows, width, dtype=torch.bfloat16) for _ in range(2))
    gate_up = ExpertMatrix(values.normal(experts, 2 * inner, width, dtype=torch.bfloat16))
    down = ExpertMatrix(values.normal(experts, width, inner, dtype=torch.bfloat16, scale=0.1))
    norm = RmsNorm(values.normal(width, dtype=torch.bfloat16), 1e-6)
    routed, out = routing(values, rows, chosen, experts), guarded(before)
    with PoisonedAllocations():
        begun = multiply_experts(x, routed, gate_up, down, out, add=True, few=True, norm=norm)
    assert isinstance(begun, BegunNorm)
    assert_close(begun.weighted, out.double() * norm.weight.double(), ulps=1)
    squares = (out.double() ** 2).sum(1)
    assert torch.allclose(begun.squares.double().sum(1), squares, rtol=1e-5)


@pytest.mark.parametrize("dtype", SUPPORTED)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("width", "add"), [(40, True), (600, False)])
def test_sorted_pairs_compute_the_next_norm(
    width: int, add: bool, wide: bool, dtype: torch.dtype
) -> None:
    rows, chosen, experts, inner, values = 40, 3, 7, 24, Values(width)
    x, before = (values.normal(rows, width, dtype=dtype) for _ in range(2))
    gate_up = ExpertMatrix(values.normal(experts, 2 * inner, width, dtype=dtype, scale=0.1))
    down = ExpertMatrix(values.normal(experts, width, inner, dtype=dtype, scale=0.1))
    # The weights of some models are in float32.
    weight = values.normal(width, dtype=torch.float32 if wide else dtype)
    norm = RmsNorm(guarded(weight), 1e-6)
    routed, out, plain = routing(values, rows, chosen, experts), guarded(before), before.clone()
    operands = x, routed, gate_up, down
    with PoisonedAllocations():
        made = multiply_experts(*operands, out, add=add, few=False, norm=norm)
    assert isinstance(made, WholeNorm)
    multiply_experts(*operands, plain, add=add, few=False)
    assert torch.equal(out, plain)
    value = out.double()
    scaled = (value * (value.square().mean(1, True) + norm.eps).rsqrt()).to(dtype)
    assert_close(made.normed, scaled.double() * weight.double(), ulps=2)
    none = NoNorm(weight, 1e-6)
    assert multiply_experts(*operands, out, add=add, few=False, norm=none) is None


@pytest.mark.parametrize("in_tile", [32, 48, 128])
def test_pairs_are_sorted_by_expert_and_then_by_number(in_tile: int) -> None:
    values = Values(1)
    ids = int32([values.different(3, 11) for _ in range(700)])
    ids[ids == 4] = 5  # an expert without pairs
    with PoisonedAllocations():
        order, experts, used, progress = sort_pairs(ids, 11, in_tile)
    found = order.view(len(experts), -1).tolist()
    flat = ids.flatten().tolist()
    got = {
        expert: [
            p for own, e in zip(found, experts.tolist(), strict=True) if e == expert for p in own
        ]
        for expert in range(11)
    }
    for expert, pairs in got.items():
        real = [p for p in pairs if p < len(flat)]
        assert real == [p for p, e in enumerate(flat) if e == expert]
        assert pairs == real + [len(flat)] * (len(pairs) - len(real))
        assert len(pairs) - len(real) < in_tile
    assert experts.tolist() == sorted(experts.tolist())
    assert used.tolist() == [sum(expert < 11 for expert in experts.tolist())]
    assert not progress[: 1 + int(used)].any()


def test_few_pairs_read_no_more_matrices_than_there_are() -> None:
    assert few_pairs(16, 8, 128) and not few_pairs(17, 8, 128)


CHOICES = [
    Choice(2),
    Choice(3, normalised=True),
    Choice(3, sigmoid=True, normalised=True, scale=2.5),
    Choice(4, sigmoid=True, groups=4, chosen_groups=2),
    Choice(1, groups=12, chosen_groups=5),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_choice_equals_the_reference(choice: Choice, biased: bool) -> None:
    values = Values(7)
    x = guarded(values.normal(37, 70, dtype=torch.float32))
    weight = guarded(values.normal(12, 70, dtype=torch.float32, scale=0.2))
    bias = guarded(values.normal(12, dtype=torch.float32)) if biased else None
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        got = decided(route(x, weight, bias, choice))
    expected = choose_experts(
        (x.double() @ weight.double().T).float().cpu(), None if bias is None else bias.cpu(), choice
    )
    assert torch.equal(got.ids.cpu(), expected.ids)
    torch.testing.assert_close(got.weights.cpu(), expected.weights)


@pytest.mark.parametrize("joined", [None, Joined(gated=False), Joined(gated=True)], ids=str)
@pytest.mark.parametrize("experts", [12, 33, 128, 200, 256])
@pytest.mark.parametrize(("rows", "normalised", "biased"), [(1, True, True), (7, False, False)])
def test_kernels_of_a_few_pairs_choose_as_the_reference(
    experts: int, rows: int, normalised: bool, biased: bool, joined: Joined | None
) -> None:
    """Also between equal logits, of which the lowest index is the first."""
    values, width, inner = Values(experts + rows), 40, 24
    choice = Choice(5, normalised=normalised, scale=1.5)
    # Sums of these numbers are exact. Otherwise a library's sums of equal rows may differ.
    x = guarded((values.normal(rows, width, dtype=DTYPE) * 8).round() / 8)
    gated, every = joined is not None and joined.gated, experts + (joined is not None)
    weight = (values.normal(experts + gated, width, dtype=DTYPE) * 8).round() / 8
    weight[experts - 3 : experts] = weight[0]
    weight = guarded(weight)
    bias = guarded(values.normal(experts, dtype=torch.float32)) if biased else None
    gate_up = ExpertMatrix(values.normal(every, 2 * inner, width, dtype=DTYPE, scale=0.2))
    down = ExpertMatrix(values.normal(every, width, inner, dtype=DTYPE, scale=0.2))
    out, own = guarded(x), range(experts)
    undecided = route(x, weight, None, choice, own, bias, joined=joined)
    with unchanged(x=x, parts=undecided.parts), PoisonedAllocations():
        multiply_experts(x, undecided, gate_up, down, out, add=False, few=True)
    logits = x.double() @ weight.double().T
    of_experts = logits[:, :experts] + (0 if bias is None else bias.double())
    chosen = choose_experts(of_experts.float().contiguous(), None, choice)
    ids, weights = chosen
    if joined is not None:
        share = torch.sigmoid(logits[:, experts:]) if gated else torch.ones(rows, 1, device=DEVICE)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], experts)], 1)
        weights = torch.cat([weights, share.float()], 1)
    assert torch.equal(decided(undecided).ids, ids)
    assert_close(out, exact(x, Routed(ids, weights), gate_up, down), ulps=16)


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
def test_kernels_of_a_few_pairs_choose_experts_for_padding_of_any_kind(number: float) -> None:
    x = torch.full((2, 16), number, dtype=DTYPE, device=DEVICE)
    undecided = route(x, torch.ones(6, 16, dtype=DTYPE, device=DEVICE), None, Choice(2))
    gate_up = ExpertMatrix(guarded(torch.ones(6, 8, 16, dtype=DTYPE, device=DEVICE)))
    down = ExpertMatrix(guarded(torch.ones(6, 16, 4, dtype=DTYPE, device=DEVICE)))
    out = guarded(x)
    multiply_experts(x, undecided, gate_up, down, out, add=False, few=True)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("gated", [False, True])
def test_a_joined_expert_is_behind_those_that_are_chosen(gated: bool) -> None:
    values, choice = Values(9), Choice(3, normalised=True, scale=2.5)
    x = guarded(values.normal(19, 70, dtype=torch.float32))
    weight = guarded(values.normal(12 + gated, 70, dtype=torch.float32, scale=0.2))
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        got = decided(route(x, weight, None, choice, joined=Joined(gated=gated)))
    logits = (x.double() @ weight.double().T).float().cpu()
    expected = choose_experts(logits[:, :12].contiguous(), None, choice)
    assert torch.equal(got.ids.cpu()[:, :3], expected.ids)
    assert got.ids[:, 3].tolist() == [12] * 19
    torch.testing.assert_close(got.weights.cpu()[:, :3], expected.weights)
    factor = torch.sigmoid(logits[:, 12]) if gated else torch.ones(19)
    torch.testing.assert_close(got.weights.cpu()[:, 3], factor)


def test_the_router_of_prompts() -> None:
    rows, width = 4100, 70
    values, choice = Values(rows), Choice(2, normalised=True)
    x = guarded(values.normal(rows, width, dtype=DTYPE))
    weight = guarded(values.normal(130, width, dtype=DTYPE))
    with unchanged(x=x, weight=weight), PoisonedAllocations():
        undecided = route(x, weight, None, choice)
        got = decided(undecided)
    logits = x.double() @ weight.double().T
    assert_close(undecided.parts.sum(0)[:, :130], logits, ulps=1, float32_ulps=512)
    expected = choose_experts(undecided.parts.sum(0)[:, :130].contiguous(), None, choice)
    assert torch.equal(got.ids, expected.ids)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_choice_of_a_row_does_not_depend_on_their_number(grouped: bool) -> None:
    """Compare rows of a prompt, of which programs have several, with a few of them."""
    rows, experts, values = 4101, 16, Values(2)
    choice = (
        Choice(4, sigmoid=True, groups=4, chosen_groups=2)
        if grouped
        else Choice(3, normalised=True)
    )
    product = poisoned(1, rows, experts, dtype=torch.float32)
    product[:] = values.normal(1, rows, experts, dtype=torch.float32)
    bias = values.normal(experts, dtype=torch.float32) if grouped else None

    def of(first: int, last: int) -> Routed:
        parts = product[:, first:last].contiguous()
        with PoisonedAllocations():
            return decided(Undecided(parts, experts, choice, bias, None, range(experts), None))

    whole = of(0, rows)
    for first in (0, 3, 1000, rows - 7):
        few = of(first, first + 7)
        assert torch.equal(few.ids, whole.ids[first : first + 7])
        assert torch.equal(few.weights, whole.weights[first : first + 7])


@pytest.mark.parametrize("rows", [1, 5, 17])
def test_the_router_norms_a_stream_whose_squares_are_summed(rows: int) -> None:
    values, choice, width = Values(10), Choice(3), 600
    hidden = guarded(values.normal(rows, width, dtype=torch.float32))
    weight = guarded(values.normal(12, width, dtype=torch.float32, scale=0.2))
    norm = RmsNorm(guarded(values.normal(width, dtype=torch.float32)), 1e-5)
    squares = guarded(torch.stack([p.square().sum(1) for p in hidden.split(150, 1)], 1))
    begun = BegunNorm(poisoned(rows, width, dtype=torch.float32), squares)
    with unchanged(hidden=hidden, weight=weight, squares=squares), PoisonedAllocations():
        normed, undecided = route_stream(Stream(hidden, norm, begun), weight, None, choice)
        routed = decided(undecided)
    expected = _norm_of(hidden, norm)
    torch.testing.assert_close(normed.cpu(), expected)
    again, undecided = route_stream(Stream(hidden, norm), weight, None, choice)
    alike = decided(undecided)
    torch.testing.assert_close(again.cpu(), expected)
    assert torch.equal(routed.ids, alike.ids)
    torch.testing.assert_close(routed.weights, alike.weights)


def _norm_of(x: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    wide = x.cpu().double()
    scale = (wide.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    return (wide * scale * norm.weight.cpu().double()).float()


@pytest.mark.parametrize("own", [range(4), range(4, 8), range(8, 12)], ids=str)
def test_the_choice_by_the_numbers_of_a_rank(own: range) -> None:
    values, choice = Values(8), Choice(3, normalised=True)
    x, weight = (values.normal(rows, 70, dtype=torch.float32) for rows in (20, 12))
    got, whole = (decided(route(x, weight, None, choice, one)) for one in (own, None))
    assert got.ids.tolist() == [
        [one - own.start if one in own else -1 for one in row] for row in whole.ids.tolist()
    ]
    assert torch.equal(got.ids, whole.on_rank(own).ids)
    assert torch.equal(got.weights, whole.weights)


def test_of_equal_scores_the_lowest_index_is_chosen() -> None:
    x = torch.zeros(3, 16, dtype=DTYPE, device=DEVICE)
    weight = torch.zeros(20, 16, dtype=DTYPE, device=DEVICE)
    choice = Choice(3, groups=5, chosen_groups=2)
    logits = torch.zeros(3, 20)
    for routed in (decided(route(x, weight, None, choice)), choose_experts(logits, None, choice)):
        assert routed.ids.tolist() == [[0, 1, 2]] * 3
        assert routed.weights.flatten().tolist() == pytest.approx([1 / 20] * 9)


def test_padding_that_is_not_a_number_still_names_experts() -> None:
    x = torch.full((2, 16), float("nan"), dtype=DTYPE, device=DEVICE)
    routed = decided(route(x, torch.ones(6, 16, dtype=DTYPE, device=DEVICE), None, Choice(2)))
    assert bool(((routed.ids >= 0) & (routed.ids < 6)).all())
