"""Steps that fail in a worker process: the worker lives, and clients see nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sidestep import AsyncLLM, EngineDeadError, RequestError, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.fault_plan import Fault
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.integration.faults.test_fault_plan import plan_of

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 60.0
POISON = 270
"""A token that only the prompt of a poison request has."""
PROMPTS = [[5, 6, 7, 8] * 6 + [i + 1] for i in range(8)]
COUNT = 40


async def tokens_of(llm: AsyncLLM, prompt: list[int], seed: int) -> list[int]:
    tokens: list[int] = []
    params = SamplingParams(
        max_tokens=COUNT, seed=seed, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
    return tokens


async def serve(llm: AsyncLLM) -> None:
    """Serve PROMPTS at once, and check their tokens."""
    vocab = llm.get_tokenizer().vocab_size
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*(tokens_of(llm, p, i) for i, p in enumerate(PROMPTS)))
    assert found == [expected_tokens(p, COUNT, i, vocab) for i, p in enumerate(PROMPTS)]


async def resets(llm: AsyncLLM) -> dict[str, float]:
    """Return the soft resets so far, by cause."""
    (stats,) = (await llm.get_stats_by_replica()).values()
    return {cause: stats[f"soft_resets_{cause}"] for cause in ("oom", "exception")}


@pytest.mark.parametrize("at", [0, 1, 2, 9, 30])
@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": False}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}],
    ids=["two steps", "one step", "chunks"],
)
async def test_a_step_that_raises_costs_no_token(
    make_llm: MakeLLM, at: int, options: dict[str, Any]
) -> None:
    llm = make_llm(fake_faults=plan_of(Fault(kind="raise", at=at)), restart_limit=0, **options)
    pids = llm.pids
    await serve(llm)
    assert await resets(llm) == {"oom": 0, "exception": 1}
    assert llm.pids == pids
    await llm.check_health()


async def test_a_want_of_memory_makes_steps_smaller(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_faults=plan_of(Fault(kind="oom", at=4)), max_num_batched_tokens=512)
    await serve(llm)
    assert await resets(llm) == {"oom": 1, "exception": 0}
    (stats,) = (await llm.get_stats_by_replica()).values()
    assert stats["max_step_tokens"] == 256


async def test_a_second_failure_soon_after_is_a_death_and_requests_go_on(
    make_llm: MakeLLM,
) -> None:
    """The restarted replica knows nothing of earlier resets, so its first one is allowed again."""
    plan = plan_of(Fault(kind="raise", at=4, start=0), Fault(kind="oom", at=20, start=0))
    llm = make_llm(fake_faults=plan)
    before = llm.pids
    await serve(llm)
    assert llm.pids["worker_0"] != before["worker_0"]
    assert await resets(llm) == {"oom": 0, "exception": 0}


async def test_a_second_failure_names_its_cause_where_nothing_is_restarted(
    make_llm: MakeLLM,
) -> None:
    plan = plan_of(Fault(kind="raise", at=4), Fault(kind="oom", at=20))
    llm = make_llm(fake_faults=plan, restart_limit=0)
    with pytest.raises(EngineDeadError, match="worker 0 .*the fault plan has no memory at step 20"):
        await tokens_of(llm, PROMPTS[0], 0)


async def test_two_failures_far_apart_are_two_resets(make_llm: MakeLLM) -> None:
    plan = plan_of(Fault(kind="raise", at=4), Fault(kind="raise", at=120))
    llm = make_llm(fake_faults=plan, restart_limit=0)
    for _ in range(4):
        await serve(llm)
    assert await resets(llm) == {"oom": 0, "exception": 2}


async def test_a_poison_that_is_named_ends_alone(make_llm: MakeLLM) -> None:
    plan = plan_of(Fault(kind="raise", for_token=POISON, named=True))
    llm = make_llm(fake_faults=plan, restart_limit=0)
    innocents = asyncio.create_task(serve(llm))
    for _ in range(3):
        with pytest.raises(RequestError, match="cannot compute this request: .*the fault plan"):
            await tokens_of(llm, [1, POISON], 0)
    await innocents
    assert await resets(llm) == {"oom": 0, "exception": 3}


def alike(fault: Fault) -> tuple[Fault, ...]:
    """Return a fault of two ranks at once."""
    return fault, msgspec.structs.replace(fault, rank=1)


async def test_a_step_that_raises_on_all_ranks_alike_costs_no_token(make_llm: MakeLLM) -> None:
    plan = plan_of(*alike(Fault(kind="raise", at=4)), *alike(Fault(kind="oom", at=150)))
    llm = make_llm(fake_faults=plan, restart_limit=0, tensor_parallel_size=2)
    for _ in range(5):
        await serve(llm)
    assert await resets(llm) == {"oom": 1, "exception": 1}


async def test_a_poison_that_all_ranks_name_ends_alone(make_llm: MakeLLM) -> None:
    plan = plan_of(*alike(Fault(kind="raise", for_token=POISON, named=True)))
    llm = make_llm(fake_faults=plan, restart_limit=0, tensor_parallel_size=2)
    innocents = asyncio.create_task(serve(llm))
    for _ in range(3):
        with pytest.raises(RequestError, match="cannot compute this request: .*the fault plan"):
            await tokens_of(llm, [1, POISON], 0)
    await innocents
    assert await resets(llm) == {"oom": 0, "exception": 3}


async def test_a_pipeline_ends_at_an_exception(make_llm: MakeLLM) -> None:
    """A stage may wait for what the stage that raised was to send."""
    plan = plan_of(*alike(Fault(kind="raise", at=4, start=0)))
    llm = make_llm(fake_faults=plan, pipeline_parallel_size=2)
    before = llm.pids
    await serve(llm)
    assert llm.pids["worker_1"] != before["worker_1"]


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
async def test_one_of_several_ranks_ends_its_replica(make_llm: MakeLLM, ranks: str) -> None:
    """The others may wait within the step for the rank that raised."""
    plan = plan_of(Fault(kind="raise", at=4, rank=1, start=0))
    llm = make_llm(fake_faults=plan, **{ranks: 2})
    before = llm.pids
    await serve(llm)
    assert llm.pids["worker_1"] != before["worker_1"]
