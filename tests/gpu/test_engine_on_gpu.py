"""The engine on a GPU: chosen by itself where there is one, and greedy tokens equal those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestep import DEFAULT_MODEL, LLM, SamplingParams
from tests.e2e.models import FAMILIES, load_reference, random_prompts, reference_tokens, write_model

pytestmark = pytest.mark.gpu


def engine_tokens(path: str, prompts: Sequence[list[int]], counts: Sequence[int], **options: Any) -> list[list[int]]:
    with LLM(path, **{"dtype": "float32", "kv_cache_memory_bytes": 1 << 30, **options}) as llm:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in counts]
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def test_the_gpu_is_taken_by_itself() -> None:
    with LLM() as llm:
        assert "cpu" not in repr(llm)
        (out,) = llm.generate("def get_name(", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 8


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_transformers(family: str, model_folder: Path) -> None:
    path = write_model(family, model_folder)
    model = load_reference(path)
    prompts = random_prompts(12, model.config.vocab_size)
    counts = [4 + 5 * (i % 5) for i in range(12)]
    got = engine_tokens(path, prompts, counts, max_num_batched_tokens=48, max_num_seqs=7, block_size=8,
                        num_kv_blocks=40, max_model_len=200)
    assert got == reference_tokens(model, prompts, counts)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_overlap_changes_no_token(seeded: bool) -> None:
    prompts = random_prompts(32, 4000)
    answers = []
    for overlap in (True, False):
        with LLM(DEFAULT_MODEL, dtype="float32", kv_cache_memory_bytes=1 << 30, async_scheduling=overlap) as llm:
            params = [SamplingParams(temperature=0.8 if seeded else 0, seed=i, max_tokens=30 + i, ignore_eos=True)
                      for i in range(32)]
            answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_two_ranks_equal_one(model_folder: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    path = write_model("llama-gqa", model_folder)
    prompts = random_prompts(8, 331)
    one, two = (engine_tokens(path, prompts, [12] * 8, tensor_parallel_size=n) for n in (1, 2))
    assert one == two
