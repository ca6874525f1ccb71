"""Keys and values kept as codes: outputs do not depend on how a request was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sidestep import LLM, EngineStartError, RequestOutput, SamplingParams, ValidationError
from tests.e2e.engines import Engines
from tests.e2e.models import write_model

PROMPTS = [
    "def get_name(self):\n    return",
    "import",
    "class Stack:\n    def push(self, it):\n        self.it." * 6,
    "for key, value in sorted(table.items()):\n    print(key, value)\nfor key,",
]
GREEDY = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
DTYPES = ["fp8", "int8", "int4_per_token_head"]
HARD: dict[str, Any] = {
    "max_num_batched_tokens": 7,
    "max_num_seqs": 7,
    "num_kv_blocks": 40,
    "block_size": 4,
    "max_model_len": 160,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}
"""Small chunks, preemption and drafts."""


def replace(params: SamplingParams, **changes: Any) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)


def run(llm: LLM, prompts: list[str] = PROMPTS) -> list[RequestOutput]:
    return llm.generate(prompts, GREEDY, use_tqdm=False)


def numbers(output: RequestOutput) -> tuple[Any, ...]:
    """Return the tokens of an output, and all logprobs of its prompt and of them."""
    own = output.outputs[0]
    return own.token_ids, own.logprobs, output.prompt_logprobs


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_do_not_depend_on_how_they_were_computed(dtype: str, engines: Engines) -> None:
    """Compare bits: chunks, prefixes from the cache, batches, preemption and drafts."""
    llm = engines.get(kv_cache_dtype=dtype)
    expected = [numbers(output) for output in run(llm)]
    # A request for prompt logprobs takes nothing from the cache.
    for _ in range(2):
        cached = llm.generate(PROMPTS, replace(GREEDY, prompt_logprobs=None), use_tqdm=False)
        assert [numbers(output)[:2] for output in cached] == [one[:2] for one in expected]
    assert max(output.num_cached_tokens or 0 for output in cached) > 16
    assert [numbers(run(llm, [prompt])[0]) for prompt in PROMPTS] == expected, "alone"
    # Choices of one request share blocks, and copy the last one.
    several = llm.generate(PROMPTS, replace(GREEDY, n=3), use_tqdm=False)
    for output, (tokens, logprobs, _) in zip(several, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [tokens] * 3
        assert [one.logprobs for one in output.outputs] == [logprobs] * 3
    hard = engines.get(kv_cache_dtype=dtype, **HARD)
    before = hard.get_stats()["num_preemptions"]
    assert [numbers(output) for output in run(hard, 2 * PROMPTS)] == 2 * expected
    assert hard.get_stats()["num_preemptions"] > before


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_keep_the_same_keys_and_values(dtype: str, engines: Engines) -> None:
    """Compare the prompts' logprobs.

    Ranks add in another order, so a few codes differ by one. Neighbours of fp8 lie up to 12 %
    apart, and those of four bits a fifteenth of a head's range, so that one such code moves a
    logprob by more than 0.05: of one token in 50 at most. The mean is a sixth of what codes of fp8
    change in the bundled model.
    """
    alone, ranks = (
        run(engines.get(kv_cache_dtype=dtype, tensor_parallel_size=size)) for size in (1, 2)
    )
    errors = [
        abs(theirs[token].logprob - mine[token].logprob)
        for one, other in zip(alone, ranks, strict=True)
        for token, mine, theirs in zip(
            one.prompt_token_ids[1:],
            (one.prompt_logprobs or [])[1:],
            (other.prompt_logprobs or [])[1:],
            strict=True,
        )
        if mine is not None and theirs is not None
    ]
    assert len(errors) == sum(len(one.prompt_token_ids) - 1 for one in alone)
    assert sum(errors) / len(errors) < 0.005 and max(errors) < 0.2
    far = [error for error in errors if error >= 0.05]
    assert len(far) <= (0 if dtype == "int8" else len(errors) // 50), far


def test_codes_are_near_the_model_and_let_longer_requests_in(engines: Engines) -> None:
    """Compare logprobs of the prompts with those of plain keys and values, in equal memory."""
    plain = engines.get(kv_cache_memory_bytes=1 << 20, dtype="bfloat16")
    expected, tokens = run(plain), {"auto": plain.max_model_len}
    for dtype, bound in (("fp8", 0.2), ("int8", 0.1), ("int4_per_token_head", 1.0)):
        llm = engines.get(kv_cache_memory_bytes=1 << 20, dtype="bfloat16", kv_cache_dtype=dtype)
        tokens[dtype] = llm.max_model_len
        errors = [
            abs(theirs[token].logprob - mine[token].logprob)
            for one, other in zip(expected, run(llm), strict=True)
            for token, mine, theirs in zip(
                one.prompt_token_ids[1:],
                (one.prompt_logprobs or [])[1:],
                (other.prompt_logprobs or [])[1:],
                strict=True,
            )
            if mine is not None and theirs is not None
        ]
        assert 0 < sum(errors) / len(errors) < bound
    assert tokens["fp8"] == tokens["int8"] >= 1.9 * tokens["auto"]
    assert tokens["int4_per_token_head"] >= 3.4 * tokens["auto"]


def test_all_layers_left_out_are_as_with_auto(engines: Engines) -> None:
    llm = engines.get()
    layers = [str(i) for i in range(6)]
    expected = [numbers(output) for output in run(llm)]
    skipping = engines.get(kv_cache_dtype="int4_per_token_head", kv_cache_dtype_skip_layers=layers)
    assert [numbers(output) for output in run(skipping)] == expected
    first = engines.get(kv_cache_dtype="int4_per_token_head", kv_cache_dtype_skip_layers=["0"])
    assert [numbers(output) for output in run(first)] != expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: 'fp8_e5m2' is not one of auto, model,"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers: has a meaning only"),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["99"]},
            "kv_cache_dtype_skip_layers: '99' is neither",
        ),
        (
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["sliding_window"]},
            "kv_cache_dtype_skip_layers: the model has no layers with a window",
        ),
        (
            {"kv_cache_dtype": "int8", "attention_backend": "flashinfer"},
            "kv_cache_dtype: attention_backend 'flashinfer' keeps keys and values",
        ),
    ],
)
def test_impossible_choices_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises((ValidationError, EngineStartError), match=problem):
        LLM(device="cpu", **options)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-token-inputs"])
def test_layers_of_several_shapes_take_blocks_from_one_another(
    family: str, engines: Engines, tmp_path: Path
) -> None:
    """Blocks that layers of another shape have used hold bytes that stand for no number."""
    model = write_model(family, tmp_path)
    prompts: list[Any] = [{"prompt_token_ids": [5 * n + i for i in range(n)]} for n in (3, 17, 40)]
    params = replace(GREEDY, prompt_logprobs=None, logprobs=None)
    small = {"max_num_batched_tokens": 7, "max_num_seqs": 2, "num_kv_blocks": 90, "block_size": 4}
    found = []
    for options in ({}, small):
        llm = engines.get(
            model, skip_tokenizer_init=True, kv_cache_dtype="int8", max_model_len=100, **options
        )
        for parts in ([prompts], [[one] for one in prompts]):
            outputs = [out for part in parts for out in llm.generate(part, params, use_tqdm=False)]
            found.append([out.outputs[0].token_ids for out in outputs])
    assert all(one == found[0] for one in found)
