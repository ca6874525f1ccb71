"""Several frontends on one core.

Each gets its own outputs, and the end of one does not affect the others.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from sidestep import AsyncLLM, EngineDeadError, EngineStartError, SamplingParams, ValidationError
from sidestep.executor.runner.fake import expected_tokens
from sidestep.frontend.replicas import engine_client
from sidestep.ipc.processes.core_args import Invitation
from tests.waiting import until, until_idle

MakeLLM = Callable[..., AsyncLLM]
ROOT = Path(__file__).resolve().parents[2]
GUEST = """
import asyncio, sys
from sidestep import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM.join(sys.stdin.readline())
    print("joined", flush=True)
    started = False
    params = SamplingParams(max_tokens=int(sys.argv[1]), seed=3, ignore_eos=True)
    async for output in llm.generate([5, 6, 7], params):
        if not started:
            print("started", flush=True)
        started = True
    print(*output.outputs[0].token_ids, flush=True)

asyncio.run(main())
"""


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, seed=3, ignore_eos=True)


async def tokens_of(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    async for out in llm.generate(prompt, params(count)):
        pass
    return out.outputs[0].token_ids


@asynccontextmanager
async def guest(llm: AsyncLLM, max_tokens: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start another process that joins and asks for tokens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        GUEST,
        str(max_tokens),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write((await llm.invite()).encode() + b"\n")
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def test_frontends_in_several_processes_get_their_own_tokens(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=1)
    vocab = llm.get_tokenizer().vocab_size
    async with guest(llm, 40) as one, guest(llm, 30) as two:
        own = asyncio.create_task(tokens_of(llm, [9, 8], 50))
        for process, count in ((one, 40), (two, 30)):
            assert [await line(process), await line(process)] == ["joined", "started"]
            assert await line(process) == " ".join(
                map(str, expected_tokens([5, 6, 7], count, 3, vocab))
            )
        assert await own == expected_tokens([9, 8], 50, 3, vocab)
        assert {r.client for r in await llm.get_request_records()} == {0, 1, 2}
    await until_idle(llm)


async def test_a_frontend_that_is_killed_loses_its_requests_and_nobody_else_s(
    make_llm: MakeLLM,
) -> None:
    llm = make_llm(fake_step_ms=5, max_model_len=2048)
    own = asyncio.create_task(tokens_of(llm, [9, 8], 200))
    async with guest(llm, 2000) as process:
        assert [await line(process), await line(process)] == ["joined", "started"]
        process.kill()
        await process.wait()
        records = await until(
            llm.get_request_records,
            lambda each: all(r.status == "finished" for r in each if r.client == 1),
        )
    (lost,) = [r for r in records if r.client == 1]
    assert lost.finish_reason == "abort" and lost.num_output_tokens < 2000
    assert await own == expected_tokens([9, 8], 200, 3, llm.get_tokenizer().vocab_size)
    await until_idle(llm)


async def test_frontends_of_one_process_end_one_by_one(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=1)
    second = AsyncLLM.join(await llm.invite())
    third = AsyncLLM.join(await llm.invite())
    expected = expected_tokens([1, 2], 20, 3, llm.get_tokenizer().vocab_size)
    assert (
        await asyncio.gather(*(tokens_of(each, [1, 2], 20) for each in (llm, second, third)))
        == [expected] * 3
    )
    running = asyncio.create_task(tokens_of(third, [1, 2], 20))
    second.shutdown()
    assert await running == await tokens_of(llm, [1, 2], 20) == expected
    with pytest.raises(EngineDeadError, match="shut down"):
        await tokens_of(second, [1], 2)
    third.shutdown()


@pytest.mark.parametrize("kill", [True, False])
async def test_the_engine_s_end_is_told_to_all(kill: bool, make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5, max_model_len=2048, restart_limit=0)
    second = AsyncLLM.join(await llm.invite())
    stream = second.generate([1, 2], params(2000))
    await anext(stream)
    if kill:
        psutil.Process(llm.core_pid).kill()
    else:
        llm.shutdown()
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    assert second.errored
    second.shutdown()


async def test_invitations_that_nobody_took_leave_nothing_behind(make_llm: MakeLLM) -> None:
    llm = make_llm()
    (seat,) = Invitation.decode(await llm.invite()).seats
    (folder,) = seat.address.folders
    assert os.path.isdir(folder)
    llm.shutdown()
    assert not os.path.exists(folder)


def test_an_invitation_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="^invitation: "):
        AsyncLLM.join("{}")


async def test_an_invitation_is_good_once_and_while_the_engine_lives(make_llm: MakeLLM) -> None:
    llm = make_llm()
    used, late = await llm.invite(), await llm.invite()
    guest = AsyncLLM.join(used)
    with pytest.raises(EngineStartError, match="used before"):
        AsyncLLM.join(used)
    guest.shutdown()
    llm.shutdown()
    with pytest.raises(EngineStartError, match="has ended"):
        AsyncLLM.join(late)


async def test_an_engine_that_was_killed_does_not_answer_an_invitation(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "_JOIN_S", 0.5)
    llm = make_llm()
    invitation = await llm.invite()
    psutil.Process(llm.core_pid).kill()
    with pytest.raises(EngineStartError, match="does not answer"):
        AsyncLLM.join(invitation)
