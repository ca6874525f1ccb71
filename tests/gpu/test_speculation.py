"""Look-up drafts on a GPU: the tokens of an engine without them, from captured steps.

A step with drafts multiplies other shapes than one without, so its logits may differ in their last
bits, and a near tie may fall the other way. So nearly all requests, and not all, must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sidestep import LLM, SamplingParams
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.model.speculative_config import tiers_of
from tests.e2e.models import random_prompts, write_model
from tests.e2e.output.test_speculation import PROMPTS, outputs
from tests.unit.executor.steps import Request, make_step
from tests.unit.executor.test_model_runner import VOCAB

pytestmark = pytest.mark.gpu

DRAFTS = 4
FIXED = {"num_speculative_tokens": DRAFTS, "prompt_lookup_min": 1, "adaptive": False}
SETTINGS: list[dict[str, Any]] = [
    FIXED,
    {**FIXED, "num_speculative_tokens": 1},
    {"num_speculative_tokens": 7, "prompt_lookup_max": 3},
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_outputs_are_the_same_with_drafts(setting: dict[str, Any], eager: bool) -> None:
    count = 60
    with LLM(dtype="float32", enforce_eager=eager, num_kv_blocks=600) as llm:
        plain = outputs(llm, count)
    with LLM(
        dtype="float32", enforce_eager=eager, num_kv_blocks=600, speculative_config=setting
    ) as llm:
        drafted, stats = outputs(llm, count), llm.get_stats()
    different = [
        i for i, (got, wanted) in enumerate(zip(drafted, plain, strict=True)) if got != wanted
    ]
    assert len(different) <= 2, f"requests {different}"
    assert 0 < stats["spec_decode_num_accepted_tokens"] < stats["spec_decode_num_draft_tokens"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_gpus_accept_the_same_drafts(split: str, eager: bool) -> None:
    """Both ranks, or both stages, know how many drafts each row has accepted."""
    count = 60
    options: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 600, split: 2}
    with LLM(enforce_eager=eager, **options) as llm:
        plain = outputs(llm, count)
    with LLM(enforce_eager=eager, speculative_config=FIXED, **options) as llm:
        drafted, stats = outputs(llm, count), llm.get_stats()
    different = [
        i for i, (got, wanted) in enumerate(zip(drafted, plain, strict=True)) if got != wanted
    ]
    assert len(different) <= 2, f"requests {different}"
    assert 0 < stats["spec_decode_num_accepted_tokens"] < stats["spec_decode_num_draft_tokens"]


def test_many_requests_in_bfloat16_end_as_they_should() -> None:
    params = [
        SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=20 + i % 30, ignore_eos=True)
        for i in range(200)
    ]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(200)]
    with LLM(dtype="bfloat16", max_num_seqs=64, speculative_config=FIXED) as llm:
        made = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.get_stats()
    counts = [len(request.outputs[0].token_ids) for request in made]
    assert counts == [asked.max_tokens for asked in params]
    assert stats["spec_decode_num_accepted_tokens"] > 0.2 * stats["spec_decode_num_draft_tokens"]


def make_runner(path: str, **parallel: Any) -> GpuRunner:
    runner = GpuRunner(
        WorkerArgs(
            rank=0,
            spec=load_model_spec(path),
            model=ModelConfig(model=path, dtype="float32"),
            cache=CacheConfig(block_size=16, num_kv_blocks=600),
            parallel=ParallelConfig(device="cuda", **parallel),
            scheduler=SchedulerConfig(
                max_num_seqs=24, max_num_batched_tokens=256, speculative_config=FIXED
            ),
            max_model_len=256,
        )
    )
    return runner


def serve(runner: GpuRunner, rows: int, drafts: int, depth: int) -> list[list[int]]:
    """Return the tokens of some requests after ten steps with drafts."""
    prompts = [prompt * 3 for prompt in random_prompts(rows, VOCAB, longest=8, seed=rows)]
    found: list[list[int]] = [[] for _ in prompts]
    steps = []
    for slot, prompt in enumerate(prompts):
        request = Request(prompt, 100, temperature=0.9 * (slot % 2), seed=slot)
        blocks = range(16 * slot, 16 * (slot + 1))
        steps.append(make_step([(slot, len(prompt), blocks)], {slot: request}, slot))
        steps[-1].entering["max_drafts"] = DRAFTS
    for number in range(10):
        steps.append(make_step([(slot, 1, []) for slot in range(rows)], {}, rows + number))
        steps[-1].num_drafts = drafts
    flying: list[Any] = []
    for step in steps:
        flying.append((step, runner.execute(step)))
        while len(flying) >= depth or (step is steps[-1] and flying):
            done, pending = flying.pop(0)
            for slot, tokens in zip(done.slots.tolist(), pending.wait().by_row(), strict=True):
                found[slot] += tokens
    return found


def test_each_number_of_drafts_has_captured_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of any number of rows replay graphs, and give the tokens of steps without drafts."""
    path = write_model("qwen3-tied", tmp_path)
    captured, eager = make_runner(path), make_runner(path, enforce_eager=True)
    graphs, kernels = captured._model.graphs, captured._model.kernels
    assert graphs is not None and kernels is not None
    assert sorted(graphs._drafting) == [1 + n for n in tiers_of(DRAFTS) if n]
    accepted = 0
    for rows in (1, 3, 8, 24):
        plain = serve(eager, rows, 0, depth=1)
        for drafts in tiers_of(DRAFTS):
            expected = serve(eager, rows, drafts, depth=1)
            with monkeypatch.context() as patch:
                launch = kernels.launch
                patch.setattr(
                    kernels,
                    "launch",
                    lambda sizes, *more, launch=launch: (
                        launch(sizes, *more)
                        if sizes.max_prompt_rows
                        else pytest.fail(f"{sizes} is not captured")
                    ),
                )
                got = serve(captured, rows, drafts, depth=2)
            same = sum(a == b for a, b in zip(got, expected, strict=True))
            assert same >= 0.9 * rows - 1
            begun = sum(a[: len(b)] == b for a, b in zip(got, plain, strict=True))
            assert begun >= 0.9 * rows - 1
            accepted += sum(map(len, got)) - 11 * rows
    assert accepted > 0
