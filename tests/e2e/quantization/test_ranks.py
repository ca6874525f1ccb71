"""Engines with quantized models generate the tokens of the decoded ones, on one rank and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import write_tokenizer
from tests.e2e.models import random_prompts, write_model
from tests.e2e.test_parity import engine_tokens
from tests.quantized.cases import CASES
from tests.quantized.written import write

PROMPTS, COUNTS = random_prompts(6, 250, longest=60), [8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(("method", "name"), [("gptq", "asym-g32"), ("fp8", "blocks-across-ranks")])
def test_two_ranks_generate_the_tokens_of_the_decoded_model(
    method: str, name: str, tmp_path: Path
) -> None:
    written = write(CASES[method][name], tmp_path)
    for path in written:
        write_tokenizer(Path(path))
    expected = engine_tokens(written.plain, PROMPTS, COUNTS)
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    assert engine_tokens(written.quantized, PROMPTS, COUNTS, tensor_parallel_size=2) == expected


def test_ranks_quantize_plain_weights_alike(model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder, hidden_size=128, intermediate_size=256)
    one, two = (
        engine_tokens(path, PROMPTS, COUNTS, quantization="int8", tensor_parallel_size=ranks)
        for ranks in (1, 2)
    )
    assert one == two
