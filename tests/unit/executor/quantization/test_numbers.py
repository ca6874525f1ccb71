"""Numbers that tools seldom write, experts, and rounding while weights are loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.executor.quantization.encode import encode
from sidestep.executor.quantization.quantized_files import EncodedMatrices, matrices_of
from sidestep.executor.weights.weight_loader import DummyWeights, SafetensorsWeights, Wanted
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.model.quantization.online import ONLINE, online_quantization
from sidestep.ipc.model.quantization.weight_scheme import WeightScheme
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.e2e.models import random_prompts, write_model
from tests.quantized.bytes_of_fp8 import block_fp8
from tests.quantized.cases import CASES, FP8
from tests.quantized.loaded import check_equal, loaded
from tests.quantized.whole_numbers import gptq, gptq_config
from tests.quantized.written import Case, Encoder, write
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread")

DOWN = "model.layers.1.mlp.down_proj"
NOT_A_NUMBER = (0x7F, 0xFF)
"""Codes of e4m3 that stand for no number."""


def test_codes_that_are_no_numbers_stay_so(tmp_path: Path) -> None:
    written = write(CASES["fp8"]["blocks-within-ranks"], tmp_path)
    file = Path(written.quantized) / "model.safetensors"
    whole = load_file(file)
    codes = whole[f"{DOWN}.weight"]
    codes.view(torch.uint8)[3, 5:7] = torch.tensor(NOT_A_NUMBER, dtype=torch.uint8)
    save_file(whole, file)
    expected = load_file(Path(written.plain) / "model.safetensors")[f"{DOWN}.weight"]
    expected[3, 5:7] = torch.nan
    spec = load_model_spec(written.quantized)
    with SafetensorsWeights(written.quantized, torch.float32, torch.device("cpu")) as weights:
        weights.matrices = matrices_of(spec.quantization)
        found = weights.matrix(DOWN, (64, 128))
    assert isinstance(found, CodedMatrix)
    torch.testing.assert_close(found.decoded(), expected, rtol=0, atol=0, equal_nan=True)


def _experts(encoder: Encoder) -> Encoder:
    """Return an encoder of all matrices but the router and the head."""
    return lambda name, weight: None if name == "lm_head" else encoder(name, weight)


EXPERTS: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
QWEN: dict[str, Any] = {
    "family": "qwen3-moe",
    "changes": {**EXPERTS, "num_experts": 6, "intermediate_size": 128},
}
EXPERT_CASES = {
    "fp8-blocks": Case(
        {**FP8, "weight_block_size": [24, 32], "modules_to_not_convert": ["lm_head", "gate"]},
        _experts(block_fp8(24, 32)),
        **QWEN,
    ),
    "int4": Case(gptq_config(), _experts(gptq()), **QWEN),
    "shared": Case(
        {**FP8, "weight_block_size": [24, 8]},
        _experts(block_fp8(24, 8)),
        family="qwen2-moe",
        changes={"num_experts": 4},
        ranks=(1,),
    ),
}


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_quantized_experts_are_read_on_a_cpu(name: str, tmp_path: Path) -> None:
    case = EXPERT_CASES[name]
    written = write(case, tmp_path)
    for ranks in case.ranks:
        for rank in range(ranks):
            quantized, plain = (loaded(one, rank, ranks) for one in written)
            check_equal(quantized, plain, rtol=1e-5)
    prompts = random_prompts(3, 250, longest=30)
    tokens, expected = (run(make_runner(one), [Request(p, 5) for p in prompts]) for one in written)
    assert tokens == expected


@pytest.mark.parametrize("name", ["fp8-blocks", "int4"])
def test_a_rank_with_whole_quantized_experts_reads_no_others(name: str, tmp_path: Path) -> None:
    written = write(EXPERT_CASES[name], tmp_path)
    for rank in range(2):
        quantized, plain = (loaded(one, rank, 2, whole_experts=True) for one in written)
        check_equal(quantized, plain, rtol=1e-5)


STEPS = {"fp8": 2**-4, "int8": 1 / 127 / 2, "int4": 0.3}
"""By kind: half of a step, of the number itself for fp8, else of the largest of its group.

The codes of int4 may leave out the ends of a group's range, by which the square error is less.
"""


def online_scheme(choice: str, name: str = "mlp.up_proj") -> WeightScheme:
    scheme = online_quantization(choice).scheme(f"model.layers.0.{name}")
    assert scheme is not None
    return scheme


@pytest.mark.parametrize("expert", ["mlp.experts.3.up_proj", "mlp.shared_expert.up_proj"])
def test_experts_in_four_bits_have_zeros(expert: str) -> None:
    scheme = online_scheme("int4", expert)
    assert scheme != online_scheme("int4") and not scheme.fitted and scheme.offset
    assert online_scheme("int8", expert) == online_scheme("int8")
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) + 0.5
    found, middle = (encode(weight, scheme, finds_zeros=one) for one in (True, False))
    assert found.zeros is not None and found.minimums is None
    assert len(found.zeros.unique()) > 4
    errors = [float((one.decoded() - weight).square().sum()) for one in (found, middle)]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("name", ["mlp.up_proj", "mlp.experts.0.up_proj"])
@pytest.mark.parametrize("choice", ONLINE)
@pytest.mark.parametrize("shape", [(48, 192), (7, 94), (5, 66)])
def test_rounding_is_within_half_a_step(choice: str, shape: tuple[int, int], name: str) -> None:
    scheme = online_scheme(choice, name)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight[2] *= 1000
    weight[3] = weight[3].abs()
    weight[4] = 0
    coded = encode(weight, scheme, finds_zeros=True)
    error, width = (coded.decoded() - weight).abs(), scheme.columns or shape[1]
    for first in range(0, shape[1], width):
        part = slice(first, first + width)
        largest = weight[:, part].abs().amax(1, keepdim=True)
        # bfloat16 has eight bits, by which a scale may be larger.
        bound = STEPS[choice] * largest * (1 + 2**-7) + 1e-30
        if choice == "fp8":
            small = largest / 448 * 2**-10
            bound = torch.maximum(weight[:, part].abs() * STEPS[choice], small) * (1 + 2**-7)
        assert bool((error[:, part] <= bound).all())
        if choice == "int4" and part.stop <= shape[1]:
            step = (weight[:, part].amax(1) - weight[:, part].amin(1)) / 15
            assert bool((error[:, part].square().mean(1) <= (step / 2 * (1 + 2**-6)) ** 2).all())
    assert not coded.decoded()[4].any() and not coded.decoded().isnan().any()


def test_four_bits_have_little_square_error() -> None:
    """Lines through the codes of four ranges alone leave 0.536% of the squares."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(3))
    error = (encode(weight, ONLINE["int4"]).decoded() - weight).square().sum()
    assert error < 0.0052 * weight.square().sum()


@pytest.mark.parametrize("choice", ONLINE)
def test_a_matrix_of_zeros_stays_zero(choice: str) -> None:
    assert not encode(torch.zeros(3, 130), ONLINE[choice]).decoded().any()


@pytest.mark.parametrize("choice", ONLINE)
@pytest.mark.parametrize("shape", [(32, 128), (24, 94), (10, 256), (1200, 128)])
def test_ranks_round_to_the_same_codes_as_one_rank(choice: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    matrices = EncodedMatrices(online_quantization(choice))
    weights = DummyWeights(5, torch.float32, torch.device("cpu"))

    def read(own_rows: range, own_columns: range) -> CodedMatrix:
        found = matrices(weights, Wanted("layer.o_proj", shape, own_rows, own_columns))
        assert isinstance(found, CodedMatrix)
        return found

    def halves(size: int) -> list[range]:
        return [range(size // 2), range(size // 2, size)]

    whole = read(range(rows), range(columns))
    by_rows = [read(part, range(columns)) for part in halves(rows)]
    for end in ("codes", "scales", "zeros"):
        parts: list[Tensor | None] = [getattr(one, end) for one in by_rows]
        _check_joined(getattr(whole, end), parts, 0)
    if columns % 4 == 0 and columns // 2 % (ONLINE[choice].columns or 1) == 0:
        by_columns = [read(range(rows), part) for part in halves(columns)]
        _check_joined(whole.codes, [one.codes for one in by_columns], 1)
        decoded = torch.cat([one.decoded() for one in by_columns], 1)
        assert torch.equal(decoded, whole.decoded())


def _check_joined(whole: Tensor | None, parts: list[Tensor | None], dim: int) -> None:
    if whole is None:
        assert parts == [None, None]
        return
    found = torch.cat([one.view(torch.uint8) for one in parts if one is not None], dim)
    assert torch.equal(found, whole.view(torch.uint8))


@pytest.mark.parametrize("choice", ONLINE)
def test_the_head_and_the_embedding_stay_plain(choice: str, tmp_path: Path) -> None:
    path = write_model("llama-gqa", tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    model: Any = loaded(path, quantization=choice)
    assert torch.equal(model._embedding._shard, read["model.embed_tokens.weight"])
    head = model._head._linear._product._product.weight
    head = head.to_dense() if head.is_mkldnn else head
    assert head.shape == read["lm_head.weight"].shape
    assert torch.equal(head, read["lm_head.weight"])


@pytest.mark.parametrize(
    "scheme",
    [
        *(WeightScheme(kind=kind, activations=kind) for kind in ("fp8", "int8")),
        WeightScheme(kind="fp8", rows=0),
        WeightScheme(kind="fp8", rows=24, columns=20),
        WeightScheme(kind="int8", columns=16, offset=True),
        WeightScheme(kind="int4", columns=32),
        WeightScheme(kind="int4", columns=32, offset=True),
        WeightScheme(kind="int4", columns=32, offset=True, fitted=True),
        WeightScheme(kind="nf4", columns=64),
    ],
    ids=str,
)
def test_matrices_without_memory_have_the_shapes_of_others(scheme: WeightScheme) -> None:
    """Kernels are compiled for the one kind, and launched for the other."""

    def form(device: str) -> list[Any]:
        matrix = encode(torch.ones(50, 70, dtype=torch.bfloat16, device=device), scheme)
        values = [getattr(matrix, field.name) for field in fields(matrix)]
        return [
            (one.shape, one.dtype, one.stride()) if isinstance(one, Tensor) else one
            for one in values
        ]

    assert form("meta") == form("cpu")
