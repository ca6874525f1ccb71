"""Pipeline stages on GPUs of their own: the tokens equal those of one GPU and transformers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sidestep import DEFAULT_MODEL, AsyncLLM, EngineArgs, EngineDeadError, SamplingParams
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model
from tests.e2e.test_pipeline import REQUESTS, TEXTS
from tests.gpu.test_engine_on_gpu import SMALL, engine_tokens

pytestmark = pytest.mark.gpu


def needs(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"fewer than {count} GPUs")


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "enforce_eager": True},
        {"pipeline_parallel_size": 2, "async_scheduling": False},
        {"pipeline_parallel_size": 2, "pipeline_layers": (1, 2)},
        {"pipeline_parallel_size": 2, "attention_backend": "torch"},
        {"pipeline_parallel_size": 2, **SMALL},
        {"pipeline_parallel_size": 3},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_stages_equal_transformers(options: dict[str, Any], model_folder: Path) -> None:
    needs(options["pipeline_parallel_size"] * options.get("tensor_parallel_size", 1))
    path = write_model("qwen3-tied", model_folder)
    model = load_reference(path)
    prompts = random_prompts(64, model.config.vocab_size, longest=90)
    counts = [3 + 7 * (i % 6) for i in range(64)]
    assert engine_tokens(path, prompts, counts, **options) == reference_tokens(
        model, prompts, counts
    )


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=str)
async def test_requests_of_all_kinds_are_answered_as_by_one_gpu(options: dict[str, Any]) -> None:
    needs(2)
    answers = []
    for stages in (1, 2):
        args = EngineArgs(
            model=DEFAULT_MODEL,
            dtype="float32",
            kv_cache_memory_bytes=1 << 30,
            max_model_len=256,
            max_num_batched_tokens=64,
            max_num_seqs=32,
            pipeline_parallel_size=stages,
            **options,
        )
        async with AsyncLLM.from_engine_args(args) as llm:

            async def answer(index: int, llm: AsyncLLM = llm) -> list[list[int]]:
                params = SamplingParams(
                    **{"temperature": 0, "seed": index, "max_tokens": 30, **REQUESTS[index]}
                )
                async for out in llm.generate(TEXTS[index % 3], params):
                    pass
                return [choice.token_ids for choice in out.outputs]

            answers.append(await asyncio.gather(*(answer(i) for i in range(len(REQUESTS)))))
    assert answers[0] == answers[1]


async def test_an_idle_engine_leaves_no_message_under_way_and_goes_on() -> None:
    """A send without a receiver would keep a kernel running."""
    needs(2)
    args = EngineArgs(model=DEFAULT_MODEL, kv_cache_memory_bytes=1 << 30, pipeline_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    async with AsyncLLM.from_engine_args(args) as llm:
        answers = []
        for _ in range(2):
            async for out in llm.generate("def get_name(", params):
                pass
            answers.append(out.outputs[0].token_ids)
            async with asyncio.timeout(30):
                while busiest_gpu() > 0:
                    await asyncio.sleep(0.5)
        assert answers[0] == answers[1]


def busiest_gpu() -> int:
    """Return the largest utilisation of any GPU: the percentage of time with a running kernel."""
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    return max(
        map(
            int, subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        )
    )


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_killed_stage_ends_the_engine_at_once(stage: int) -> None:
    needs(2)
    args = EngineArgs(
        model=DEFAULT_MODEL,
        kv_cache_memory_bytes=1 << 30,
        pipeline_parallel_size=2,
        restart_limit=0,
    )
    llm = AsyncLLM.from_engine_args(args)
    try:

        async def endless() -> None:
            async for _ in llm.generate(
                "def get_name(", SamplingParams(max_tokens=1900, ignore_eos=True)
            ):
                pass

        call = asyncio.create_task(endless())
        while (await llm.get_stats())["num_steps"] < 10:
            await asyncio.sleep(0)
        core = psutil.Process(llm.core_pid)
        workers = core.children()
        os.kill(workers[stage].pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            with pytest.raises(
                EngineDeadError, match=rf"worker {stage} \(stage {stage}\) .* was killed by SIGKILL"
            ):
                await call
        assert psutil.wait_procs([core, *workers], timeout=5)[1] == []
    finally:
        llm.shutdown()
