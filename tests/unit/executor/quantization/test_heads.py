"""A head that a checkpoint has quantized is kept so, also where its model is tied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidestep.executor.layers import vocab
from sidestep.executor.layers.linear import Linear
from sidestep.executor.weights.weight_loader import Matrix
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
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
