"""Weights and caches in few bits on a GPU: logprobs are those of a CPU with the same bits.

The CPU's products and codes are tested against float64 by themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sidestep import LLM, SamplingParams
from tests.e2e.conftest import write_tokenizer
from tests.e2e.models import random_prompts, write_model
from tests.quantized.cases import CASES
from tests.quantized.written import write

pytestmark = pytest.mark.gpu

PROMPTS = random_prompts(9, 250, longest=90)
GREEDY = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1, logprobs=1
)
CODED_GROUPS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
KV_DTYPES = ["fp8", "int8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
EXPERTS: dict[str, Any] = {
    "qwen3-moe": {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128},
    "mixtral": {"hidden_size": 128, "intermediate_size": 128},
}


def logprobs_of(path: str, **options: Any) -> list[float]:
    """Return the logprobs of all tokens of the prompts and answers.

    Steps have few tokens, so that no input is rounded.
    """
    on_gpu = {"kv_cache_memory_bytes": 1 << 29} if options.get("device") != "cpu" else {}
    with LLM(
        path, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=256, **on_gpu, **options
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        own = output.outputs[0]
        assert own.logprobs is not None and len(own.token_ids) == 12
        rows = [*output.prompt_logprobs[1:], *own.logprobs]
        for token, choices in zip(
            [*output.prompt_token_ids[1:], *own.token_ids], rows, strict=True
        ):
            assert choices is not None
            found.append(choices[token].logprob)
    return found


def compare(path: str, limit: float = 0.01, **options: Any) -> None:
    """Compare the mean difference of a GPU and a CPU, both in float32, with a limit."""
    one, other = (
        logprobs_of(path, dtype="float32", device=device, **options) for device in ("cuda", "cpu")
    )
    assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one) < limit


@pytest.mark.parametrize("method", ["fp8", "int8", "int4"])
def test_weights_quantized_at_load(method: str, model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder, **CODED_GROUPS)
    compare(path, quantization=method, head_quantization="none")


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_experts_quantized_at_load(method: str, family: str, model_folder: Path) -> None:
    path = write_model(family, model_folder, **EXPERTS[family])
    compare(path, quantization=method, head_quantization="none")


@pytest.mark.parametrize(("method", "name"), [(m, next(iter(CASES[m]))) for m in CASES])
def test_files_of_every_method(method: str, name: str, tmp_path: Path) -> None:
    written = write(CASES[method][name], tmp_path)
    for path in written:
        write_tokenizer(Path(path))
    # The numbers of NormalFloat are rounded to 16 bits on a GPU.
    compare(written.quantized, limit=0.2 if method == "bitsandbytes" else 0.01)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_keys_and_values_in_codes(dtype: str, family: str, model_folder: Path) -> None:
    path = write_model(family, model_folder, head_dim=32)
    compare(path, kv_cache_dtype=dtype)


TEXT = (Path(json.__file__).parent / "decoder.py").read_text()


@pytest.mark.parametrize("tokens", [64, 2048], ids=["few", "many"])
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"quantization": "fp8"}, 0.02),
        ({"quantization": "int8"}, 0.01),
        ({"quantization": "int4"}, 0.08),
        ({"head_quantization": "fp8"}, 0.02),
        ({"head_quantization": "int8"}, 0.01),
        ({"kv_cache_dtype": "fp8"}, 0.02),
        ({"kv_cache_dtype": "int8"}, 0.01),
        ({"kv_cache_dtype": "int4_per_token_head"}, 0.08),
    ],
    ids=str,
)
def test_a_text_is_about_as_likely_in_bfloat16(
    options: dict[str, Any], limit: float, tokens: int
) -> None:
    def mean(**others: Any) -> float:
        with LLM(
            kv_cache_memory_bytes=1 << 29,
            dtype="bfloat16",
            max_num_batched_tokens=tokens,
            max_num_seqs=8,
            **others,
        ) as llm:
            text = llm.get_tokenizer().encode(TEXT)[:900]
            (output,) = llm.generate([text], GREEDY, use_tqdm=False)
        assert output.prompt_logprobs is not None
        rows = zip(text[1:], output.prompt_logprobs[1:], strict=True)
        return sum(row[token].logprob for token, row in rows if row is not None) / (len(text) - 1)

    assert mean(**options) == pytest.approx(mean(), abs=limit)


@pytest.mark.parametrize(
    "options", [{}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}], ids=str
)
def test_graphs_change_no_token(options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = ["def get_name(", "import os", "class Stack:\n"] * 3

    def tokens(**others: Any) -> list[list[int]]:
        with LLM(kv_cache_memory_bytes=1 << 29, dtype="bfloat16", **options, **others) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(enforce_eager=True)
    assert tokens() == expected
    assert tokens(async_scheduling=False) == expected
