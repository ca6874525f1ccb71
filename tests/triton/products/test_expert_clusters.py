"""Products of experts by a Hopper GPU's kernels against float64; and which experts they take."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from sidestep.kernels import gpu
from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.experts import experts_triton
from sidestep.kernels.experts.clustered_pairs import PAIRS, multiply_many, takes
from sidestep.kernels.experts.common.cuda_options import Activation
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import SortedConfigs, StreamConfigs
from sidestep.kernels.experts.common.sorted_pairs_triton import sort_pairs
from sidestep.kernels.experts.expert_codes import ExpertCodes
from sidestep.kernels.experts.streamed_pairs import multiply_streamed
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.triton.quantized.coded_matrices import WHOLE, Form, guarded_codes, matrix_of
from tests.triton.quantized.test_rounded_inputs import rounded
from tests.triton.support import (
    DEVICE,
    DTYPE,
    PoisonedAllocations,
    Values,
    assert_close,
    guarded,
    int32,
    needs_gpu,
    unchanged,
)

needs_compiler = pytest.mark.skipif(not compiles(), reason="needs NVIDIA's compiler (NVRTC)")
SILU: Activation = (False, None, None)
TILES = [PAIRS, 16, 48, 64]
"""Pairs of a tile; clusters take the first, and with the others matrices stream by."""
BLOCKS, ROWS = Form("fp8", 128, 128), Form("fp8", WHOLE)


class Sizes(NamedTuple):
    rows: int
    chosen: int
    experts: int
    width: int
    inner: int


SIZES = [
    Sizes(1, 1, 2, 64, 64),
    Sizes(700, 2, 8, 256, 128),
    # Parts of steps and of tiles; and all pairs of one expert but a few.
    Sizes(300, 2, 4, 200, 72),
    Sizes(500, 1, 3, 328, 200),
    Sizes(1500, 4, 16, 640, 384),
]


def choice(values: Values, sizes: Sizes) -> Tensor:
    """Return experts of each row: many of the last one, and some that are not here."""
    ids = int32([values.different(sizes.chosen, sizes.experts) for _ in range(sizes.rows)])
    if sizes.chosen > 1:
        ids[::3, 0] = -1
        ids[1::3, 1] = sizes.experts - 1
    return ids


def multiplied(
    x: Tensor,
    ids: Tensor,
    gate_up: ExpertMatrix | ExpertCodes,
    down: ExpertMatrix | ExpertCodes,
    activation: Activation = SILU,
    *,
    in_tile: int = PAIRS,
) -> Tensor:
    """Return the results of all pairs of rows and their experts `ids`."""
    pairs, chosen = sort_pairs(ids, down.num_experts, in_tile), ids.shape[1]
    with unchanged(order=pairs.order):
        if in_tile == PAIRS:
            return multiply_many(x, chosen, pairs, gate_up, down, activation)
        assert isinstance(gate_up, ExpertMatrix) and isinstance(down, ExpertMatrix)
        configs = StreamConfigs(in_tile)
        return multiply_streamed(x, chosen, pairs, gate_up, down, activation, configs)


def activated(gate: Tensor, up: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    """Return act(gate) * up, float64. act(gate) is rounded, unless it is clamped."""
    gelu, alpha, limit = activation
    if alpha is not None and limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        return gate * (gate * alpha).sigmoid() * up
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    return act.to(dtype).double() * up


def exact(
    x: Tensor,
    ids: Tensor,
    gate_up: list[Tensor],
    down: list[Tensor],
    biases: tuple[Tensor, Tensor] | None,
    activation: Activation,
    *,
    codes: bool,
) -> Tensor:
    """Return the results of all pairs, float64 [T * k, D]; 0 for those that are not here."""
    flat = ids.flatten()
    out = torch.zeros(len(flat), len(down[0]), dtype=torch.float64, device=x.device)
    given = rounded(x, "fp8", 128) if codes else x.double()
    for expert, (first, last) in enumerate(zip(gate_up, down, strict=True)):
        at = (flat == expert).nonzero().flatten()
        if not len(at):
            continue
        both = given[at // ids.shape[1]] @ first.double().T
        if biases is not None:
            both += biases[0][expert].double()
        # Gate and up are rounded, as by kernels of their own.
        gate, up = both.to(x.dtype).double().chunk(2, 1)
        inner = activated(gate, up, activation, x.dtype)
        inner = rounded(inner, "fp8", 128) if codes else inner.to(x.dtype).double()
        out[at] = inner @ last.double().T
        if biases is not None:
            out[at] += biases[1][expert].double()
    return out


@needs_gpu
@needs_compiler
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [SILU, (True, None, None), (False, 1.702, 1.5)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("in_tile", TILES)
def test_numbers_in_16_bits(
    sizes: Sizes, dtype: torch.dtype, activation: Activation, biased: bool, in_tile: int
) -> None:
    rows, chosen, experts, width, inner = sizes
    values = Values(rows)
    x = guarded(values.normal(rows, width, dtype=dtype))
    shapes = (experts, 2 * inner, width), (experts, width, inner)
    gate_up, down = (
        guarded(values.normal(*shape, dtype=dtype, scale=shape[2] ** -0.5)) for shape in shapes
    )
    biases = (
        guarded(values.normal(experts, 2 * inner, dtype=dtype)),
        guarded(values.normal(experts, width, dtype=dtype)),
    )
    matrices = [
        ExpertMatrix(matrix, bias if biased else None)
        for matrix, bias in zip((gate_up, down), biases, strict=True)
    ]
    ids = choice(values, sizes)
    with unchanged(x=x, gate_up=gate_up, down=down), PoisonedAllocations():
        found = multiplied(x, ids, matrices[0], matrices[1], activation, in_tile=in_tile)
    wanted = exact(
        x, ids, list(gate_up), list(down), biases if biased else None, activation, codes=False
    )
    there = ids.flatten() >= 0
    assert found.shape == wanted.shape and bool(there.any())
    assert_close(found[there], wanted[there], ulps=16)


def few_numbers(matrix: CodedMatrix, seed: int) -> CodedMatrix:
    """Return the matrix with codes of 0, 1 and 2, whose results are about 1 in size."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-4, 5, matrix.shape, generator=random)
    codes = torch.where(codes.abs() < 3, codes, 0).float().to(torch.float8_e4m3fn)
    return replace(matrix, codes=codes.to(DEVICE), scales=matrix.scales * 70)


def in_codes(
    form: Form, experts: int, rows: int, columns: int, *, few: bool = False
) -> tuple[ExpertCodes, list[Tensor]]:
    """Return matrices whose inputs may be rounded, and their numbers."""
    made = [
        replace(matrix_of(form, rows, columns, DTYPE, seed=seed), activations="fp8")
        for seed in range(experts)
    ]
    if few:
        made = [few_numbers(matrix, seed) for seed, matrix in enumerate(made)]
    stack = guarded_codes([ExpertCodes.of(matrix) for matrix in made])
    return stack, [matrix.decoded(torch.float32) for matrix in made]


@needs_gpu
@needs_compiler
@pytest.mark.parametrize("form", [BLOCKS, ROWS], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES[:2], SIZES[4], Sizes(900, 2, 4, 336, 208)], ids=str)
def test_codes(form: Form, sizes: Sizes) -> None:
    rows, chosen, experts, width, inner = sizes
    if form == BLOCKS and (width % 128 or inner < 256):
        width, inner = 384, 256
    values = Values(rows)
    # The tensor cores add 8-bit products in 14 bits. Gate and up have sums that need fewer, so no
    # inner value is rounded to another code than it should be.
    x = values.normal(rows, width, dtype=DTYPE).round().clamp(-2, 2)
    x[:, ::64] = 2
    x = guarded(x)
    gate_up, first = in_codes(form, experts, 2 * inner, width, few=True)
    down, last = in_codes(form, experts, width, inner)
    assert takes(gate_up, down)
    ids = choice(values, sizes)
    with unchanged(x=x, words=gate_up.words), PoisonedAllocations():
        found = multiplied(x, ids, gate_up, down)
    there = ids.flatten() >= 0
    wanted = exact(x, ids, first, last, None, SILU, codes=True)[there]
    assert bool(wanted.norm(dim=1).all())
    error = (found[there].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(error.quantile(0.99)) < 0.01
    assert float(error.max()) < 0.1, "more than one code of one inner value"


@needs_gpu
@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("codes", "in_tile"), [(True, PAIRS), *[(False, in_tile) for in_tile in TILES]]
)
def test_rows_that_are_not_finite_stay_apart(bad: float, codes: bool, in_tile: int) -> None:
    sizes = Sizes(400, 2, 4, 256, 128)
    values = Values(1)
    x = values.normal(sizes.rows, sizes.width, dtype=DTYPE)
    shapes = (2 * sizes.inner, sizes.width), (sizes.width, sizes.inner)
    matrices: list[ExpertMatrix] | list[ExpertCodes]
    if codes:
        matrices = [in_codes(BLOCKS, sizes.experts, *shape)[0] for shape in shapes]
    else:
        matrices = [
            ExpertMatrix(values.normal(sizes.experts, *shape, dtype=DTYPE, scale=0.1))
            for shape in shapes
        ]
    ids = choice(values, sizes).abs()
    clean = multiplied(x, ids, matrices[0], matrices[1], in_tile=in_tile)
    x[7, 5] = bad
    found = multiplied(x, ids, matrices[0], matrices[1], in_tile=in_tile)
    others = torch.arange(2 * sizes.rows, device=DEVICE) // 2 != 7
    assert torch.equal(found[others], clean[others])
    assert not bool(found[~others].isfinite().all())


@needs_gpu
@needs_compiler
def test_bits_do_not_depend_on_the_tiles_or_the_blocks() -> None:
    """Take items in another order each time: blocks share them out as they come."""
    sizes = Sizes(600, 4, 16, 512, 384)
    values = Values(3)
    x = values.normal(sizes.rows, sizes.width, dtype=DTYPE)
    gate_up, down = (
        ExpertMatrix(values.normal(sizes.experts, *shape, dtype=DTYPE, scale=0.05))
        for shape in ((2 * sizes.inner, sizes.width), (sizes.width, sizes.inner))
    )
    ids = choice(values, sizes).abs()
    first = multiplied(x, ids, gate_up, down, in_tile=64)
    for in_tile in (16, 32, 48, 64) * 5:
        assert torch.equal(multiplied(x, ids, gate_up, down, in_tile=in_tile), first)
    few = multiplied(x[:20], ids[:20], gate_up, down, in_tile=16)
    assert torch.equal(few, first[: len(few)])


@needs_gpu
@needs_compiler
@pytest.mark.parametrize("in_tile", TILES)
def test_no_pair_of_this_rank(in_tile: int) -> None:
    values = Values(1)
    x = values.normal(20, 64, dtype=DTYPE)
    gate_up, down = (
        ExpertMatrix(values.normal(4, *shape, dtype=DTYPE)) for shape in ((128, 64), (64, 64))
    )
    ids = int32([[-1, -1]] * 20)
    assert multiplied(x, ids, gate_up, down, in_tile=in_tile).shape == (40, 64)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("form", "width", "inner", "taken"),
    [
        (BLOCKS, 256, 128, True),
        (BLOCKS, 256, 96, False),
        (ROWS, 200, 72, True),
        (ROWS, 200, 76, False),
        (Form("int8", WHOLE), 256, 128, False),
        (Form("fp8", 128), 256, 128, False),
    ],
)
def test_which_codes_are_taken(form: Form, width: int, inner: int, taken: bool) -> None:
    (gate_up, _), (down, _) = (
        in_codes(form, 2, *shape) for shape in ((2 * inner, width), (width, inner))
    )
    assert takes(gate_up, down) == taken


def test_inputs_are_rounded_only_where_a_checkpoint_says_so() -> None:
    matrix = matrix_of(ROWS, 64, 128, DTYPE)
    assert matrix.activations is None
    assert not takes(*[_one(matrix)] * 2)
    rounding = replace(matrix, activations="fp8")
    assert takes(*[_one(rounding)] * 2)
    # A scale of all rows' inputs is another form.
    fixed = replace(rounding, input_scale=torch.ones(1, device=DEVICE))
    assert not takes(*[_one(fixed)] * 2)


def _one(matrix: CodedMatrix) -> ExpertCodes:
    return guarded_codes([ExpertCodes.of(matrix)])


@needs_compiler
@pytest.mark.parametrize(
    ("capability", "rows", "expected"), [(90, 512, True), (90, 511, False), (80, 512, False)]
)
def test_many_pairs_on_hopper(
    capability: int, rows: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "gpu_of", lambda _: gpu.Gpu(capability, 132))
    x = torch.empty(rows, 64, dtype=torch.bfloat16, device="meta")
    gate_up, down = (ExpertMatrix(x.new_empty(16, *shape)) for shape in ((128, 64), (64, 64)))
    assert experts_triton._suits_clusters(x, 2 * rows, gate_up, down) == expected
    usual = experts_triton._configs(x, 2 * rows, gate_up, down, few=False)
    assert isinstance(usual, StreamConfigs if capability == 90 else SortedConfigs)
