"""The engine on a GPU, which it chooses by itself where there is one.

Greedy tokens equal those of transformers, whatever runs beside a request and however its step is
launched.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from sidestep import DEFAULT_MODEL, LLM, BeamSearchParams, EngineStartError, SamplingParams
from sidestep.ipc.model.cache_groups import cache_groups
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import FAMILIES, load_reference, random_prompts, reference_tokens, write_model
from tests.e2e.output.test_beam_search import reference_beams

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 7,
    "block_size": 16,
    "num_kv_blocks": 24,
    "max_model_len": 200,
}
"""Options so small that prompts come in chunks and requests are preempted."""


def engine_tokens(
    path: str, prompts: Sequence[list[int]], counts: Sequence[int], **options: Any
) -> list[list[int]]:
    with LLM(path, **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 30, **options}) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def test_the_gpu_is_taken_by_itself() -> None:
    with LLM() as llm:
        assert "cpu" not in repr(llm)
        (out,) = llm.generate(
            "def get_name(", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        assert len(out.outputs[0].token_ids) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, model_folder: Path) -> None:
    if family == "gpt-oss" and "swiglu_limit" not in inspect.getsource(GptOssExperts):
        pytest.skip("this version of transformers has a limit of its own")
    path = write_model(family, model_folder)
    model = load_reference(path)
    prompts = random_prompts(12, model.config.vocab_size)
    counts = [4 + 5 * (i % 5) for i in range(12)]
    groups = cache_groups(load_model_spec(path).layers, SMALL["max_model_len"])
    blocks = SMALL["num_kv_blocks"] * (groups.has_full + len(groups.windows))
    expected = reference_tokens(model, prompts, counts)
    assert engine_tokens(path, prompts, counts, **SMALL | {"num_kv_blocks": blocks}) == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"attention_backend": "torch"},
        {"async_scheduling": False},
        {"enable_prefix_caching": False},
        {"block_size": 16},
        {"block_size": 128},
        {**SMALL, "enforce_eager": True},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
    ],
    ids=str,
)
def test_greedy_tokens_do_not_depend_on_how_steps_run(
    options: dict[str, Any], model_folder: Path
) -> None:
    path = write_model("qwen3-tied", model_folder)
    model = load_reference(path)
    prompts = random_prompts(64, model.config.vocab_size, longest=90)
    prompts += [
        prompts[3] + prompts[4],
        prompts[3] + prompts[5],
    ]  # prefixes that the cache may serve
    counts = [3 + 7 * (i % 6) for i in range(66)]
    assert engine_tokens(path, prompts, counts, **options) == reference_tokens(
        model, prompts, counts
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 96, "block_size": 16}],
    ids=str,
)
def test_prompts_in_16_bits_are_near_those_in_32(options: dict[str, Any]) -> None:
    """Cover the kernel that takes prompts in 16 bits alone, with whole prompts and in chunks."""
    source = Path(__file__).read_text()
    texts = [source[start : start + 600 * (1 + start // 2000)] for start in (0, 2000, 4000)]
    found = []
    for dtype in ("float32", "bfloat16"):
        with LLM(DEFAULT_MODEL, dtype=dtype, kv_cache_memory_bytes=1 << 30, **options) as llm:
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            outputs = llm.generate(texts, params, use_tqdm=False)
        found.append(
            [
                next(iter(token.values())).logprob
                for out in outputs
                for token in (out.prompt_logprobs or [])
                if token
            ]
        )
    apart = (torch.tensor(found[0]) - torch.tensor(found[1])).abs()
    assert len(apart) > 800
    # Rounding moves them by 0.02 on average, with each backend.
    assert apart.mean() < 0.04 and apart.max() < 0.6


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_overlap_and_graphs_change_no_token(seeded: bool) -> None:
    prompts = random_prompts(32, 4000)
    answers = []
    for options in ({}, {"async_scheduling": False}, {"enforce_eager": True}):
        with LLM(DEFAULT_MODEL, dtype="float32", kv_cache_memory_bytes=1 << 30, **options) as llm:
            params = [
                SamplingParams(
                    temperature=0.8 if seeded else 0,
                    seed=i,
                    max_tokens=30 + i,
                    ignore_eos=True,
                    top_k=[0, 20][i % 2],
                    top_p=[1.0, 0.9, 0.5][i % 3],
                    min_p=[0.0, 0.05][i % 2],
                )
                for i in range(32)
            ]
            answers.append(
                [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
            )
    assert answers[0] == answers[1] == answers[2]


def test_min_tokens_holds_stop_tokens_back() -> None:
    with LLM(DEFAULT_MODEL, kv_cache_memory_bytes=1 << 30) as llm:
        plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        (out,) = llm.generate("def get_name(", plain, use_tqdm=False)
        tokens = out.outputs[0].token_ids
        for minimum in (0, 12):
            params = SamplingParams(
                temperature=0, max_tokens=30, min_tokens=minimum, stop_token_ids=[tokens[4]]
            )
            (out,) = llm.generate("def get_name(", params, use_tqdm=False)
            got = out.outputs[0].token_ids
            assert len(got) >= max(minimum, 5 if minimum == 0 else 12)
            assert tokens[4] not in got[:minimum]
            assert minimum or got == tokens[: tokens.index(tokens[4]) + 1]


def test_too_little_memory_says_what_to_change() -> None:
    with pytest.raises(EngineStartError, match="gpu_memory_utilization"):
        LLM(DEFAULT_MODEL, gpu_memory_utilization=0.001)


def test_auto_max_model_len_follows_the_cache(model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    with LLM(path, max_model_len="auto", num_kv_blocks=3, block_size=16) as llm:
        (out,) = llm.generate(
            [[1] * 20],
            SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )
        assert len(out.outputs[0].token_ids) == 48 - 20


def test_two_ranks_equal_one(model_folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    path = write_model("llama-gqa", model_folder)
    prompts = random_prompts(8, 331)
    one, two = (engine_tokens(path, prompts, [12] * 8, tensor_parallel_size=n) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"async_scheduling": False},
        {"attention_backend": "torch"},
        {"block_size": 16},
        {**SMALL, "num_kv_blocks": 30},
    ],
    ids=str,
)
def test_choices_equal_lone_requests(options: dict[str, Any], model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    prompts = random_prompts(6, 331)
    params = [
        SamplingParams(n=4, seed=i, temperature=0.9, top_k=20, max_tokens=20, ignore_eos=True)
        for i in range(6)
    ]
    base = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 30}
    with LLM(path, **{**base, **options}) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = llm.generate(
            [p for p in prompts for _ in range(4)],
            [p.for_choice(i) for p in params for i in range(4)],
            use_tqdm=False,
        )
    assert [c.token_ids for out in together for c in out.outputs] == [
        out.outputs[0].token_ids for out in alone
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"enforce_eager": True}, {"block_size": 16}, {**SMALL, "num_kv_blocks": 40}],
    ids=str,
)
def test_beam_search_equals_transformers(options: dict[str, Any], model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    model = load_reference(path)
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    prompts = random_prompts(6, 331)
    with LLM(path, **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 30, **options}) as llm:
        for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
            expected = reference_beams(model, prompt, params, ())
            # Among beams that are equally likely except for rounding, a GPU may find another one
            # than the CPU.
            assert [s.score for s in output.sequences] == pytest.approx(
                [score for _, score in expected], abs=2e-4
            )
            found = sum(
                s.tokens[len(prompt) :] == tokens
                for s, (tokens, _) in zip(output.sequences, expected, strict=True)
            )
            assert found >= 2, "more than ties differ"


def test_replicas_are_on_gpus_of_their_own_and_give_the_same_tokens(model_folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    path = write_model("llama-gqa", model_folder)
    model = load_reference(path)
    prompts = random_prompts(24, model.config.vocab_size)
    counts = [4 + 5 * (i % 5) for i in range(24)]
    free = [torch.cuda.mem_get_info(device)[0] for device in (0, 1)]
    with LLM(path, dtype="float32", kv_cache_memory_bytes=1 << 30, data_parallel_size=2) as llm:
        assert all(torch.cuda.mem_get_info(device)[0] < free[device] for device in (0, 1))
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert {record.replica for record in llm.get_request_records()} == {0, 1}
    assert [out.outputs[0].token_ids for out in outputs] == reference_tokens(model, prompts, counts)
