"""A head that a checkpoint has quantized is kept so, also where its model is tied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestep.executor.layers import vocab
from sidestep.executor.layers.linear import Linear
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.weights.weight_loader import Matrix
from sidestep.ipc.common.errors import EngineStartError, ValidationError
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.e2e.models import write_model
from tests.quantized.by_packages import (
    bitsandbytes_config,
    compressed,
    config_of,
    eight_bits,
    four_bits,
    scheme_of,
)
from tests.quantized.bytes_of_fp8 import block_fp8, nvfp4, row_fp8, tensor_fp8
from tests.quantized.cases import FP8
from tests.quantized.loaded import check_equal, loaded
from tests.quantized.whole_numbers import awq, awq_config, gptq, gptq_config
from tests.quantized.written import SIZES, Case, write

CHANGES = {**SIZES, "vocab_size": 336}
_INT8 = scheme_of("int-quantized", {"num_bits": 8, "strategy": "channel"}, None, ["Linear"])
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
CASES = {
    "fp8-blocks": Case({**FP8, "weight_block_size": [24, 32]}, block_fp8(24, 32)),
    "fp8-matrix": Case(FP8, tensor_fp8()),
    "fbgemm": Case({"quant_method": "fbgemm_fp8"}, row_fp8()),
    "modelopt": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, tensor_fp8(static=True)),
    "nvfp4": Case(_NVFP4, nvfp4),
    "gptq": Case(gptq_config(lm_head=True), gptq()),
    "gptq-unstated": Case({**gptq_config(), "lm_head": None}, gptq()),
    "awq": Case(awq_config(), awq()),
    "compressed-tensors": Case(config_of(_INT8, ignore=[]), compressed(_INT8)),
    "nf4": Case(bitsandbytes_config("nf4"), four_bits("nf4")),
    "bitsandbytes-int8": Case(bitsandbytes_config(), eight_bits),
}
"""By method: files that have all matrices quantized, the head too, and do not exclude it."""


@contextmanager
def heads() -> Iterator[list[Matrix]]:
    """Yield a list of the matrices that heads are loaded from within."""
    found: list[Matrix] = []

    def build(matrix: Matrix) -> Linear:
        found.append(matrix)
        return Linear(matrix)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab, "Linear", build)
        yield found


def tie(path: str) -> None:
    config = Path(path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_quantized_head_is_kept_in_its_form(name: str, tied: bool, tmp_path: Path) -> None:
    """Compare all weights with those of the decoded model, of one rank or of each of two."""
    case = CASES[name]
    written = write(Case(case.config, case.encode, changes=CHANGES), tmp_path)
    if tied:
        tie(written.quantized)
    for rank, ranks in ((0, 1),) if tied else ((0, 2), (1, 2)):
        with heads() as found:
            quantized = loaded(written.quantized, rank, ranks)
        assert isinstance(found[0], CodedMatrix)
        assert found[0].shape == (336 // ranks, 64)
        plain = loaded(written.plain, rank, ranks)
        check_equal(quantized, plain, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if "gptq" not in name])
def test_a_head_that_is_plain_stays_plain(name: str, tmp_path: Path) -> None:
    """Files need not state it. Plans count it as plain, for they do not look at the weights."""
    case = CASES[name]

    def encode(matrix: str, weight: Any) -> Any:
        return None if matrix == "lm_head" else case.encode(matrix, weight)

    path = write(Case(case.config, encode, changes=CHANGES), tmp_path).quantized
    with heads() as found:
        loaded(path)
    assert not isinstance(found[0], CodedMatrix)
    quantization = load_model_spec(path).quantization
    assert quantization is not None
    planned = quantization.scheme("lm_head")
    assert (planned is None) == (name != "compressed-tensors")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("options", "rounded"),
    [
        ({}, False),
        ({"head_quantization": "int8"}, True),
        ({"quantization": "fp8"}, True),
        ({"quantization": "int4", "head_quantization": "none"}, False),
    ],
    ids=str,
)
def test_a_plain_head_is_rounded_where_the_user_wants_it(
    options: dict[str, Any], rounded: bool, tied: bool, tmp_path: Path
) -> None:
    """Load a head that is large enough for a CPU's kernels of 8 bits."""
    path = write_model("llama-gqa", tmp_path, **SIZES, vocab_size=8000, tie_word_embeddings=tied)
    with heads() as found:
        model = loaded(path, **options)
    assert isinstance(found[0], CodedMatrix) == rounded
    plain = dict(weights_of(loaded(path)))
    for name, weight in weights_of(model).items():
        if "embed" in name:
            assert torch.equal(weight, plain[name]), "the embedding keeps its numbers"


def test_rounding_a_head_of_a_quantized_model(tmp_path: Path) -> None:
    """Round the plain head of files whose layers are in codes; refuse it where it is in codes."""
    case = CASES["awq"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "coded").mkdir()

    def encode(matrix: str, weight: Any) -> Any:
        return None if matrix == "lm_head" else case.encode(matrix, weight)

    changes = {**SIZES, "vocab_size": 8000}
    plain = write(Case(case.config, encode, changes=changes), tmp_path / "plain").quantized
    with heads() as found:
        loaded(plain, head_quantization="fp8")
    assert isinstance(found[0], CodedMatrix) and found[0].kind == "int8"
    coded = write(Case(case.config, case.encode, changes=changes), tmp_path / "coded").quantized
    with pytest.raises(EngineStartError, match="head_quantization: the files have"):
        loaded(coded, head_quantization="fp8")


def test_what_of_a_head_is_planned(tmp_path: Path) -> None:
    path = write_model("llama-gqa", tmp_path, **SIZES)

    def head(**options: Any) -> str | None:
        quantization = load_model_spec(path, **options).quantization
        found = quantization.head if quantization is not None else None
        return found.kind if found is not None else None

    assert head() is None
    assert [head(quantization=one) for one in ("fp8", "int8", "int4")] == ["fp8", "int8", "int8"]
    assert head(quantization="int4", head_quantization="fp8") == "fp8"
    assert head(quantization="fp8", head_quantization="none") is None
    with pytest.raises(ValidationError, match="head_quantization: a model that pools has none"):
        load_model_spec(path, runner="pooling", head_quantization="int8")
