"""Replicas join a busy engine and leave an idle one, and no token is lost by that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from sidestep import AsyncLLM, SamplingParams
from sidestep.executor.runner.fake import expected_tokens
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.processes import is_alive
from tests.waiting import until

MakeLLM = Callable[..., AsyncLLM]
SCALING = {
    "max_replicas": 3,
    "scale_up_ttft": 0.2,
    "scale_down_after": 1.0,
    "fake_step_ms": 20.0,
    "max_num_seqs": 4,
}
"""Options with which some tens of requests need more than one replica."""


async def _ask(llm: AsyncLLM, seed: int, count: int) -> None:
    """Generate, and compare the tokens with those that the fake device must give."""
    prompt = random.Random(seed).choices(range(1, 200), k=24)
    tokens: list[int] = []
    async for output in llm.generate(
        prompt,
        SamplingParams(
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
    ):
        tokens += output.outputs[0].token_ids
    assert tokens == expected_tokens(prompt, count, 0, llm.get_tokenizer().vocab_size)


def _num_serving(llm: AsyncLLM) -> int:
    return len([each for each in llm.replicas if each.ready is not None])


async def _until_serving(num: int, *llms: AsyncLLM) -> None:
    """Return when each frontend sees a number of replicas."""

    async def seen() -> list[int]:
        await asyncio.sleep(0.05)
        return [_num_serving(llm) for llm in llms]

    await until(seen, lambda nums: nums == [num] * len(llms))


async def _load_until(llm: AsyncLLM, num: int) -> None:
    """Keep the engine busy until it has a number of replicas."""
    seeds = iter(range(100_000))

    async def keep_asking() -> None:
        while _num_serving(llm) < num:
            await _ask(llm, next(seeds), 20)

    await asyncio.gather(*(keep_asking() for _ in range(32)))


async def test_replicas_follow_the_load(make_llm: MakeLLM) -> None:
    llm = make_llm(**SCALING)
    assert _num_serving(llm) == 1
    await _load_until(llm, 3)
    pids = set(llm.pids.values())
    await _until_serving(1, llm)
    left = pids - set(llm.pids.values())
    assert len(left) == 4  # two cores, each with a worker

    async def living() -> set[int]:
        await asyncio.sleep(0.05)
        return {pid for pid in left if is_alive(pid)}

    await until(living, lambda pids: not pids)
    assert llm.health == "healthy"
    await _load_until(llm, 2)  # a replica that has left may join again
    assert (llm.recovery.joined, llm.recovery.left) == (3, 2)
    assert not llm.recovery.restarts


async def test_long_requests_go_on_while_their_replica_leaves(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidestep.frontend.replicas.scaling.keeper._PATIENCE_S", 1.0)
    llm = make_llm(data_parallel_size=2, **SCALING)
    asked = [asyncio.create_task(_ask(llm, seed, 400)) for seed in range(2)]
    await _until_serving(1, llm)
    assert not all(task.done() for task in asked)
    await asyncio.gather(*asked)


async def test_frontends_that_have_joined_follow(make_llm: MakeLLM) -> None:
    llm = make_llm(**SCALING)
    guest = await asyncio.to_thread(AsyncLLM.join, await llm.invite())
    try:
        await _load_until(guest, 2)
        assert llm.recovery.joined >= 1
        await _until_serving(1, llm, guest)
        await _ask(guest, 1, 8)
        late = await asyncio.to_thread(AsyncLLM.join, await llm.invite())
        await _ask(late, 2, 8)
        assert _num_serving(late) == 1
        late.shutdown()
    finally:
        guest.shutdown()


async def test_absent_replicas_cannot_be_asked(make_llm: MakeLLM) -> None:
    llm = make_llm(**SCALING)
    with pytest.raises(ValidationError, match="replica: 2 has left, or has not been needed yet"):
        await llm.get_step_records(replica=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_replicas": 2}, "min_replicas: has a meaning only with max_replicas"),
        ({"max_replicas": 1, "data_parallel_size": 2}, "max_replicas: 1 is less"),
        ({"max_replicas": 3, "min_replicas": 2}, "min_replicas: 2 is more"),
        ({"max_replicas": 3, "scale_up_ttft": 0.0}, "scale_up_ttft: must be above 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    make_llm: MakeLLM, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_llm(**options)
