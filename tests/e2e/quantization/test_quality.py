"""Weights that are quantized while they load leave the bundled model's perplexity near its own."""

from __future__ import annotations

import textwrap
from math import exp

import pytest

from sidestep import LLM, SamplingParams
from tests.e2e.engines import Engines

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
BOUNDS = {"fp8": 1.01, "int8": 1.01, "int4": 1.08}
"""Largest perplexity, of that of the plain model.

docs/quantization.md has it for a longer text. It differs from text to text: of four bits it was 3.8
to 6.3 % higher.
"""
PARTS = 6


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return parts of a module of the standard library, of some 1,000 tokens each."""
    with open(textwrap.__file__, encoding="utf-8") as file:
        whole = file.read()
    size = len(whole) // PARTS
    return [whole[i * size : (i + 1) * size] for i in range(PARTS)]


def perplexity(llm: LLM, texts: list[str]) -> float:
    found = []
    for output in llm.generate(texts, PARAMS, use_tqdm=False):
        tokens, columns = output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:]
        for token, column in zip(tokens, columns, strict=True):
            assert column is not None
            found.append(column[token].logprob)
    assert len(found) > 2000
    return exp(-sum(found) / len(found))


@pytest.mark.parametrize("choice", BOUNDS)
def test_perplexity_is_near_that_of_the_plain_model(
    choice: str, texts: list[str], engines: Engines
) -> None:
    plain, quantized = (perplexity(engines.get(quantization=one), texts) for one in (None, choice))
    assert plain != quantized
    assert quantized < BOUNDS[choice] * plain
