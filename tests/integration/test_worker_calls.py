"""Calls to the workers of whole engines on the fake device: profiles, sleep, new weights."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep import AsyncLLM, SamplingParams, ValidationError, WorkerCallError
from sidestep.executor.runner.fake import expected_tokens
from tests.waiting import until, until_idle, until_stats

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


@pytest.mark.parametrize("replicas", [1, 2])
async def test_after_a_sleep_outputs_are_as_before_and_nothing_is_cached(
    replicas: int, make_llm: MakeLLM
) -> None:
    llm = make_llm(data_parallel_size=replicas, tensor_parallel_size=2)
    vocab = llm.get_tokenizer().vocab_size
    prompt = list(range(1, 60))
    for level in (1, 2):
        assert await tokens_of(llm, prompt, 9) == expected_tokens(prompt, 9, 5, vocab)
        await llm.sleep(level)
        assert await llm.is_sleeping()
        await llm.check_health()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        assert (await llm.get_stats())["kv_cache_cached_blocks"] == 0
    assert await tokens_of(llm, prompt, 9) == expected_tokens(prompt, 9, 5, vocab)


async def test_all_ranks_of_all_replicas_tell_their_memory_awake_and_asleep(
    make_llm: MakeLLM,
) -> None:
    """The fake device has neither weights nor a cache in memory."""
    llm = make_llm(data_parallel_size=2, tensor_parallel_size=2)
    expected = [
        {"replica": replica, "rank": rank, "weights": 0, "kv_cache": 0}
        for replica in range(2)
        for rank in range(2)
    ]
    assert await llm.get_memory_use() == expected
    await llm.sleep()
    assert await llm.get_memory_use() == expected


async def test_requests_wait_for_a_sleeping_engine_and_can_be_cancelled(make_llm: MakeLLM) -> None:
    llm = make_llm()
    vocab = llm.get_tokenizer().vocab_size
    await llm.sleep()
    waiting = asyncio.create_task(tokens_of(llm, [1, 2, 3], 9))
    unwanted = asyncio.create_task(tokens_of(llm, [4, 5, 6], 9))
    await until_stats(llm, num_waiting=2)
    unwanted.cancel()
    await until(llm.get_stats, lambda stats: stats["num_waiting"] == 1)
    await llm.wake_up()
    assert await waiting == expected_tokens([1, 2, 3], 9, 5, vocab)
    await until_idle(llm)


async def test_a_deadline_holds_while_the_engine_sleeps(make_llm: MakeLLM) -> None:
    llm = make_llm()
    await llm.sleep()
    async for out in llm.generate([1, 2, 3], SamplingParams(max_tokens=9), deadline_s=0.05):
        pass
    assert out.outputs[0].stop_reason == "deadline"
    await llm.wake_up()
    await until_idle(llm)


async def test_sleep_waits_for_running_requests_or_is_refused_in_time(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=8.0, data_parallel_size=2)
    running = asyncio.create_task(tokens_of(llm, [1, 2, 3], 300))
    await until_stats(llm, num_running=1)
    with pytest.raises(WorkerCallError, match="sleep: requests still ran after 0 s"):
        await llm.sleep(timeout_s=0.0)
    assert not await llm.is_sleeping(), "the other replica was idle, and has been woken"
    assert not running.done()
    await llm.sleep()
    assert running.done() and len(running.result()) == 300


async def test_a_sleep_that_is_cancelled_while_it_waits_does_not_begin(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5.0)
    running = asyncio.create_task(tokens_of(llm, [1, 2, 3], 2000))
    await until_stats(llm, num_running=1)
    sleep = asyncio.create_task(llm.sleep())
    behind = asyncio.create_task(tokens_of(llm, [4, 5], 5))
    await until_stats(llm, num_waiting=1)
    assert sleep.cancel()
    assert len(await behind) == 5 and not running.done()
    running.cancel()
    await until_idle(llm)
    assert not await llm.is_sleeping()


async def test_a_worker_that_dies_asleep_is_noticed(make_llm: MakeLLM) -> None:
    llm = make_llm(restart_limit=0)
    await llm.sleep()
    os.kill(llm.pids["worker_0"], signal.SIGKILL)
    error = await llm.wait_dead()
    assert "worker 0" in str(error)


@pytest.mark.parametrize("level", [0, 3, True])
async def test_other_levels_are_refused(level: int, make_llm: MakeLLM) -> None:
    with pytest.raises(ValidationError, match="^level: must be 1 or 2"):
        await make_llm().sleep(level)


async def test_a_device_without_weights_says_so(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm()
    with pytest.raises(WorkerCallError, match="prepare_weights: the fake device has no weights"):
        await llm.update_weights(str(tmp_path))
    assert len(await tokens_of(llm, [1, 2, 3], 9)) == 9
