"""Greedy tokens equal those of transformers, in float32 on the CPU.

This holds whatever the batch, and however it is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from sidestep import DEFAULT_MODEL, LLM, SamplingParams
from sidestep.ipc.model.cache_groups import cache_groups
from sidestep.ipc.model.layer_spec import attention_of
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import (
    COMMON,
    RandomModel,
    load_reference,
    random_prompts,
    reference_tokens,
    write_model,
)


def engine_tokens(
    path: str, prompts: Sequence[list[int]], counts: Sequence[int], **options: Any
) -> list[list[int]]:
    """Return the engine's tokens for all prompts at once."""
    with LLM(path, **{"device": "cpu", "dtype": "float32", "cpu_threads": 1, **options}) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "family",
    [
        "llama-rope-llama3",
        "mistral-window",
        "qwen2",
        "qwen3-tied",
        "gemma3",
        "gemma4-token-inputs",
        "olmo3",
        "qwen3-next",
        "qwen3.5",
    ],
)
def test_each_architecture_equals_transformers_in_a_mixed_batch(
    family: str, random_model: RandomModel
) -> None:
    """Cover each architecture once.

    tests/unit/executor/test_model_runner.py has every family, without an engine around the model.
    """
    path, model = random_model(family)
    groups = cache_groups(load_model_spec(path).layers, 200)
    prompts = random_prompts(12, model.config.vocab_size)
    counts = [4 + 5 * (i % 5) for i in range(12)]
    expected = reference_tokens(model, prompts, counts)
    assert len({tuple(tokens) for tokens in expected}) == 12, "the model says the same to everybody"
    # The budget and the blocks are small: prompts come in chunks, and the cache forces preemption.
    got = engine_tokens(
        path,
        prompts,
        counts,
        max_num_batched_tokens=48,
        max_num_seqs=7,
        block_size=8,
        num_kv_blocks=30 * (groups.has_full + len(groups.windows)),
        max_model_len=200,
    )
    assert got == expected


@pytest.mark.parametrize(
    ("family", "blocks"), [("mistral-window", 20), ("olmo3", 120), ("gemma4-token-inputs", 120)]
)
def test_a_prompt_of_ten_windows_in_a_cache_with_room_for_few(
    family: str, blocks: int, random_model: RandomModel
) -> None:
    """Give the cache fewer blocks than the prompt has in all groups; a prefix is found again."""
    path, model = random_model(family)
    window = max(mixer.window for mixer in attention_of(load_model_spec(path).layers))
    (prompt,) = random_prompts(1, model.config.vocab_size, longest=1)
    long = [(7 * i + prompt[0]) % model.config.vocab_size for i in range(10 * window)]
    prompts, counts = [long, [*long, 1, 2]], [20, 9]
    expected = reference_tokens(model, prompts, counts)
    options = {
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
        "block_size": 4,
        "num_kv_blocks": blocks,
        "max_model_len": 300,
    }
    with LLM(path, **options) as llm:
        outputs = [
            llm.generate(
                p, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False
            )[0]
            for p, n in zip(prompts, counts, strict=True)
        ]
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert [out.num_cached_tokens for out in outputs] == [0, 10 * window]


PROMPTS_64, COUNTS_64 = random_prompts(64, COMMON["vocab_size"]), [8 + i % 9 for i in range(64)]


@pytest.fixture(scope="module")
def tokens_64(random_model: RandomModel) -> list[list[int]]:
    """Return the tokens of 64 requests by transformers."""
    return reference_tokens(random_model("llama-gqa")[1], PROMPTS_64, COUNTS_64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False, "max_num_batched_tokens": 64, "block_size": 16},
        {
            "enable_prefix_caching": False,
            "num_kv_blocks": 70,
            "block_size": 4,
            "max_model_len": 200,
        },
    ],
    ids=str,
)
def test_64_requests_equal_transformers_however_they_are_run(
    options: dict[str, Any], random_model: RandomModel, tokens_64: list[list[int]]
) -> None:
    path, _ = random_model("llama-gqa")
    assert engine_tokens(path, PROMPTS_64, COUNTS_64, max_num_seqs=64, **options) == tokens_64


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("llama-mqa-odd-sizes", 2),
        ("llama-biases", 2),
        ("qwen3-tied", 2),
        ("llama-gqa", 4),
        ("gemma2", 2),
        ("gemma3", 2),
        ("gemma4-token-inputs", 2),
        ("gemma4-moe", 2),
        ("glm4", 2),
        ("ministral3", 2),
        ("olmo2", 4),
        ("phi3-window", 2),
        ("qwen3-moe", 2),
        ("glm4-moe", 2),
        ("qwen3-next", 2),
        ("qwen3.5", 2),
        ("gpt-oss", 2),
    ],
)
def test_several_ranks_equal_transformers(
    family: str, ranks: int, random_model: RandomModel
) -> None:
    """Cover vocabularies that are no multiples of the ranks.

    With four ranks, two ranks share each of the two KV heads.
    """
    path, model = random_model(family)
    assert model.config.vocab_size % ranks
    assert ranks < 4 or model.config.num_key_value_heads == 2
    prompts, counts = random_prompts(8, model.config.vocab_size), [12] * 8
    got = engine_tokens(
        path, prompts, counts, tensor_parallel_size=ranks, max_num_batched_tokens=64, max_num_seqs=8
    )
    assert got == reference_tokens(model, prompts, counts)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("gemma4-moe", 2),
        ("glm4-moe", 2),
        ("glm4-moe", 4),
        ("gpt-oss", 2),
        ("qwen3-moe-every-second-layer", 2),
    ],
)
def test_ranks_with_whole_experts_equal_transformers(
    family: str, ranks: int, random_model: RandomModel
) -> None:
    path, model = random_model(family)
    prompts, counts = random_prompts(8, model.config.vocab_size), [12] * 8
    options = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    got = engine_tokens(path, prompts, counts, enable_expert_parallel=True, **options)
    assert got == reference_tokens(model, prompts, counts)


@pytest.mark.parametrize("size", [1, 2])
def test_dummy_weights_do_not_depend_on_the_number_of_ranks(size: int, model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    for file in model_folder.glob("*.safetensors"):
        file.unlink()
    prompts = random_prompts(4, 331)
    got = engine_tokens(path, prompts, [6] * 4, tensor_parallel_size=size, load_format="dummy")
    DUMMY_TOKENS.setdefault("first", got)
    assert got == DUMMY_TOKENS["first"]


DUMMY_TOKENS: dict[str, list[list[int]]] = {}


TEXTS = [
    "def get_name(",
    "class Stack:",
    "import os\n\ndef read_file(path):",
    "for i in range(",
    "    return self",
]


@pytest.fixture(scope="module")
def bundled_prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(DEFAULT_MODEL)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


def test_the_bundled_model_equals_transformers(bundled_prompts: list[list[int]]) -> None:
    counts = [40] * len(bundled_prompts)
    expected = reference_tokens(load_reference(DEFAULT_MODEL), bundled_prompts, counts)
    assert engine_tokens(DEFAULT_MODEL, bundled_prompts, counts) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_exact_as_that_of_transformers(
    dtype: str, bundled_prompts: list[list[int]]
) -> None:
    """Compare distances, because tokens themselves may differ.

    Rounding decides which of two close logits is larger, and differs between CPUs.
    """
    exact = load_reference(DEFAULT_MODEL, torch.float64)
    rounded = load_reference(DEFAULT_MODEL, getattr(torch, dtype))
    for prompt, tokens in zip(
        bundled_prompts,
        engine_tokens(DEFAULT_MODEL, bundled_prompts, [40] * 5, dtype=dtype),
        strict=True,
    ):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            logits, theirs = (
                model(ids).logits[0, len(prompt) - 1 : -1].double() for model in (exact, rounded)
            )
        error = (theirs - logits).abs().max()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(1).values - chosen).max() <= 2 * error
