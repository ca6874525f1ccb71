"""Data-parallel replicas in real processes.

Conversations stay cached, and a replica's death costs time only.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable

import psutil
import pytest

from sidestep import LLM, AsyncLLM, EngineArgs, EngineDeadError, EngineStartError, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.params.sampling_params import RequestOutputKind
from sidestep.ipc.transport import channels
from sidestep.ipc.transport.messages import ToFrontend, decode_to_frontend
from tests.processes import is_alive
from tests.waiting import until, until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 30.0
"""Seconds that a notice may take on a busy machine. Without it, calls would wait for minutes."""
TURNS = 10


async def converse(llm: AsyncLLM, system: list[int], session: int) -> None:
    """Run ten turns of a conversation, each with all the text before it."""
    rng = random.Random(session)
    history = system + [rng.randrange(1, 200) for _ in range(rng.randint(16, 120))]
    for _ in range(TURNS):
        async for output in llm.generate(
            history,
            SamplingParams(
                max_tokens=rng.randint(4, 12),
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        ):
            pass
        assert output.outputs[0].token_ids == expected_tokens(
            history, len(output.outputs[0].token_ids), 0, llm.get_tokenizer().vocab_size
        )
        history += output.outputs[0].token_ids + [
            rng.randrange(1, 200) for _ in range(rng.randint(8, 40))
        ]


async def hit_rate(llm: AsyncLLM) -> float:
    """Return the hit rate of a thousand requests in a hundred conversations, 25 at a time.

    All conversations begin alike.
    """
    seats, system = asyncio.Semaphore(25), list(range(1, 65))

    async def seated(session: int) -> None:
        async with seats:
            await converse(llm, system, session)

    await asyncio.gather(*(seated(session) for session in range(100)))
    stats = await llm.get_stats()
    return stats["prefix_cache_hits"] / stats["prefix_cache_queries"]


async def test_conversations_are_cached_as_in_one_large_replica_and_the_load_is_even(
    make_llm: MakeLLM,
) -> None:
    large = await hit_rate(make_llm(num_kv_blocks=2400, max_num_seqs=64))
    llm = make_llm(data_parallel_size=2, num_kv_blocks=1200, max_num_seqs=32)
    assert await hit_rate(llm) >= 0.9 * large > 0.5
    stats = (await llm.get_stats_by_replica()).values()
    computed = [each["prefix_cache_queries"] - each["prefix_cache_hits"] for each in stats]
    records = await llm.get_request_records()
    taken = [sum(record.replica == replica for record in records) for replica in (0, 1)]
    assert len(records) == 1000
    for load in (computed, taken):
        assert max(load) <= 1.2 * sum(load) / 2
    await until_idle(llm)


async def tokens_of(llm: AsyncLLM, prompt: list[int], seed: int, count: int) -> list[int]:
    tokens: list[int] = []
    async for output in llm.generate(
        prompt,
        SamplingParams(
            max_tokens=count, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        ),
    ):
        tokens += output.outputs[0].token_ids
    return tokens


def running(pids: set[int]) -> set[int]:
    return {pid for pid in pids if is_alive(pid)}


@pytest.mark.parametrize(
    ("victim", "ranks"),
    [
        ("replica_0_core", {"tensor_parallel_size": 2}),
        ("replica_1_worker_1", {"pipeline_parallel_size": 2}),
    ],
)
async def test_a_killed_replica_costs_its_requests_time_and_nothing_else(
    make_llm: MakeLLM, victim: str, ranks: dict[str, int]
) -> None:
    """Cover requests that wait and requests that stream: each reader gets its own tokens, once."""
    llm = make_llm(data_parallel_size=2, fake_step_ms=5.0, max_num_seqs=8, restart_limit=0, **ranks)
    guest = AsyncLLM.join(await llm.invite())
    prompts = [[i % 5 + 1] * 20 + [i] for i in range(60)]
    tasks = [
        asyncio.create_task(tokens_of(each, prompt, i, 40))
        for i, prompt in enumerate(prompts)
        for each in (llm, guest)
    ]
    await until(
        llm.get_stats_by_replica,
        lambda replicas: min(stats["num_running"] for stats in replicas.values()) == 8,
    )
    number = int(victim.split("_")[1])
    theirs = {pid for name, pid in llm.pids.items() if name.startswith(f"replica_{number}")}
    os.kill(llm.pids[victim], signal.SIGKILL)
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks)
    vocab = llm.get_tokenizer().vocab_size
    assert results == [
        expected_tokens(prompt, 40, i, vocab) for i, prompt in enumerate(prompts) for _ in range(2)
    ]
    for each in (llm, guest):
        assert [status.dead is not None for status in each.replicas] == [number == 0, number == 1]
        await each.check_health()
    assert "SIGKILL" in (llm.replicas[number].dead or "")
    async with asyncio.timeout(LIMIT_S):
        while running(theirs):
            await asyncio.sleep(0.01)
    late = AsyncLLM.join(await llm.invite())
    assert await tokens_of(late, [7, 8], 3, 5) == expected_tokens([7, 8], 5, 3, vocab)
    assert late.replicas[number].dead == llm.replicas[number].dead
    await until_idle(llm)
    # The engine dies with its last replica.
    streams = [asyncio.create_task(tokens_of(each, [1], 1, 2000)) for each in (llm, guest, late)]
    await until_stats(llm, num_running=3)
    os.kill(llm.pids[f"replica_{1 - number}_core"], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        for error in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(error, EngineDeadError) and f"replica {1 - number}: " in str(error)
    for each in (guest, late, llm):
        assert each.errored
        each.shutdown()


async def test_a_message_of_a_core_that_cannot_be_read_costs_that_core_and_no_token(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(data_parallel_size=2, fake_step_ms=1.0, restart_limit=0)
    num_read = itertools.count()

    def decode(data: bytes) -> ToFrontend:
        if next(num_read) == 20:
            raise ValueError("at byte 3")
        return decode_to_frontend(data)

    monkeypatch.setattr(channels, "decode_to_frontend", decode)
    prompts = [[5, i, 7] for i in range(4)]
    results = await asyncio.gather(*(tokens_of(llm, p, i, 60) for i, p in enumerate(prompts)))
    vocab = llm.get_tokenizer().vocab_size
    assert results == [expected_tokens(p, 60, i, vocab) for i, p in enumerate(prompts)]
    (lost,) = [status for status in llm.replicas if status.dead is not None]
    assert "could not be read: at byte 3" in (lost.dead or "")
    async with asyncio.timeout(LIMIT_S):
        while is_alive(llm.pids[f"replica_{lost.number}_core"]):
            await asyncio.sleep(0.01)
    await until_idle(llm)


def test_a_replica_that_cannot_start_says_which_and_leaves_no_process(fake_model: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(
        EngineStartError, match="^replica [01]: max_model_len: 2048 tokens do not fit"
    ):
        AsyncLLM.from_engine_args(
            EngineArgs(
                model=fake_model,
                device="fake",
                num_kv_blocks=4,
                data_parallel_size=2,
                max_model_len=2048,
            )
        )
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_batch_of_the_real_model_is_the_same_on_two_replicas_and_on_one() -> None:
    prompts = [f"def function_{i}(self, value):\n    " for i in range(12)]

    def texts(llm: LLM) -> list[list[int]]:
        llm.reset_prefix_cache()
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False
        )
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(device="cpu", data_parallel_size=2) as llm:
        on_two = texts(llm)
        assert {record.replica for record in llm.get_request_records()} == {0, 1}
        psutil.Process(llm.pids["replica_1_core"]).kill()
        assert texts(llm) == on_two
        assert {record.replica for record in llm.get_request_records()} == {0}
