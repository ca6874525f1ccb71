"""Calls to the workers of whole engines on the fake device: profiles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep import AsyncLLM, SamplingParams, ValidationError, WorkerCallError
from sidestep.executor.runner.fake import expected_tokens

MakeLLM = Callable[..., AsyncLLM]


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    async for out in llm.generate(
        prompt, SamplingParams(max_tokens=count, seed=5, ignore_eos=True)
    ):
        tokens = list(out.outputs[0].token_ids)
    return tokens


async def test_each_rank_writes_a_profile_of_the_steps_while_it_was_on(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    llm = make_llm(tensor_parallel_size=2, profiler_dir=str(tmp_path / "profiles"))
    vocab = llm.get_tokenizer().vocab_size
    await tokens_of(llm, [1, 2], 3)
    before = int((await llm.get_stats())["num_steps"])
    await llm.start_profile()
    running = asyncio.create_task(tokens_of(llm, [3, 4], 20))
    assert await tokens_of(llm, [1, 2, 3], 9) == expected_tokens([1, 2, 3], 9, 5, vocab)
    assert await running == expected_tokens([3, 4], 20, 5, vocab)
    files = await llm.stop_profile()
    after = int((await llm.get_stats())["num_steps"])
    await tokens_of(llm, [1, 2], 3)
    assert len(set(files)) == 2
    for rank, file in enumerate(files):
        assert Path(file).parent == tmp_path / "profiles" and f"rank{rank}." in file
        events = json.loads(Path(file).read_text())["traceEvents"]
        assert [event["name"] for event in events] == [f"step {i}" for i in range(before, after)]


async def test_a_profile_that_cannot_begin_or_end_is_refused_and_the_engine_goes_on(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    llm = make_llm(data_parallel_size=2)
    with pytest.raises(ValidationError, match="^path: must name a folder"):
        await llm.start_profile()
    with pytest.raises(WorkerCallError, match="stop_profile: no profile is being recorded"):
        await llm.stop_profile()
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkerCallError, match="replica 0: start_profile: .*/file/x cannot be made"):
        await llm.start_profile(str(tmp_path / "file" / "x"))
    await llm.start_profile(str(tmp_path))
    with pytest.raises(WorkerCallError, match="a profile is being recorded already"):
        await llm.start_profile(str(tmp_path))
    assert len(await tokens_of(llm, [1, 2, 3], 9)) == 9
    assert [Path(file).name.partition(".")[0] for file in await llm.stop_profile()] == [
        "replica0-rank0",
        "replica1-rank0",
    ]
