"""Faults: when a process dies, every waiting call fails at once with the cause.

When the program ends, nothing is left.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from sidestep import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    EngineStalledError,
    EngineStartError,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.processes import is_alive
from tests.waiting import until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 30.0
"""Seconds that a notice may take on a busy machine. Without it, calls would wait for minutes."""
STEP_MS = 10.0
"""Duration of a step: an endless request then lasts until its test has done what it does to it."""
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)


HELD = SamplingParams(
    max_tokens=2000, structured_outputs=StructuredOutputsParams(regex="([ab]{2} ){2000}")
)


async def consume(llm: AsyncLLM, params: SamplingParams = ENDLESS) -> None:
    async for _ in llm.generate([1, 2, 3], params):
        pass


def engine_processes(llm: AsyncLLM) -> tuple[int, list[int]]:
    core = next(p for p in psutil.Process().children() if p.pid == llm.core_pid)
    return core.pid, [p.pid for p in core.children()]


@pytest.mark.parametrize(
    "victim",
    [
        "core",
        "worker 0 (stage 0, tp rank 0)",
        "worker 2 (stage 1, tp rank 0)",
        "worker 3 (stage 1, tp rank 1)",
    ],
)
@pytest.mark.parametrize("params", [ENDLESS, HELD], ids=["plain", "held to a form"])
async def test_a_killed_process_fails_every_waiting_call_with_the_cause(
    make_llm: MakeLLM, victim: str, params: SamplingParams
) -> None:
    llm = make_llm(
        fake_step_ms=STEP_MS, tensor_parallel_size=2, pipeline_parallel_size=2, restart_limit=0
    )
    calls = [asyncio.create_task(consume(llm, params)) for _ in range(5)]
    await until_stats(llm, num_running=5)
    core, workers = engine_processes(llm)
    os.kill(core if victim == "core" else workers[int(victim[len("worker ")])], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineDeadError)
        assert "SIGKILL" in str(result)
        assert ("engine core" if victim == "core" else victim) in str(result)
    with pytest.raises(EngineDeadError):
        await consume(llm)
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    assert llm.errored
    for pid in (core, *workers):
        assert gone(pid)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_that_is_killed_is_named_and_not_the_one_that_waits_for_it(
    make_llm: MakeLLM, stage: int
) -> None:
    """Run with real messages between the stages: the other stage only misses an answer."""
    options = {"device": "cpu", "load_format": "dummy", "cpu_threads": 1, "max_model_len": 2048}
    llm = make_llm(pipeline_parallel_size=2, restart_limit=0, **options)
    call = asyncio.create_task(consume(llm))
    await until_stats(llm, num_steps=10)
    core, workers = engine_processes(llm)
    os.kill(workers[stage], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(
            EngineDeadError, match=rf"worker {stage} \(stage {stage}\) .* was killed by SIGKILL"
        ):
            await call
    assert all(gone(pid) for pid in (core, *workers))


async def test_after_a_death_another_engine_starts_at_once(make_llm: MakeLLM) -> None:
    llm = make_llm(pipeline_parallel_size=2, restart_limit=0)
    os.kill(engine_processes(llm)[1][1], signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        await consume(llm)
    await consume(make_llm(pipeline_parallel_size=2), SamplingParams(max_tokens=3))


def test_a_rank_that_is_killed_while_ranks_come_together_is_named(fake_model: str) -> None:
    """Name the killed rank at once: the other ranks would wait for it for minutes."""
    args = EngineArgs(model=fake_model, device="cpu", load_format="dummy", pipeline_parallel_size=2)
    others = workers()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(AsyncLLM.from_engine_args, args)
        while (
            len(ranks := {name: each for each, name in workers().items() if each not in others}) < 2
        ):
            assert not starting.done(), "the start has ended before both ranks were there"
            time.sleep(0.01)
        ranks["worker 1 (stage 1)"].kill()
        with pytest.raises(
            EngineStartError, match=r"worker 1 \(stage 1\) .* was killed by SIGKILL"
        ):
            starting.result(2 * LIMIT_S)
    assert psutil.wait_procs(list(ranks.values()), timeout=LIMIT_S)[1] == []


def workers() -> dict[psutil.Process, str]:
    """Return the names of the workers of all engines of this program."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = process.cmdline()[-1]
        except (psutil.NoSuchProcess, IndexError):
            continue
        if name.startswith("worker "):
            found[process] = name
    return found


def gone(pid: int) -> bool:
    end = time.monotonic() + LIMIT_S
    while is_alive(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


async def test_an_engine_that_lives_but_makes_no_progress_is_not_healthy(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=STEP_MS)
    await llm.check_health()
    call = asyncio.create_task(consume(llm))
    await until_stats(llm, num_running=1)
    _, (worker,) = engine_processes(llm)
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(EngineStalledError):
            async with asyncio.timeout(20):
                while True:
                    await llm.check_health(max_stall_s=0.2)
    finally:
        os.kill(worker, signal.SIGCONT)
    await llm.check_health()
    call.cancel()


def test_a_failure_at_start_is_one_line_and_leaves_no_process(fake_model: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    arguments = EngineArgs(model=fake_model, device="fake", num_kv_blocks=4, max_model_len=2048)
    with pytest.raises(
        EngineStartError, match="2048 tokens do not.* 64 or less.*128 blocks"
    ) as told:
        AsyncLLM.from_engine_args(arguments)
    assert "\n" not in str(told.value)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_a_worker_finds_wrong_at_start_is_told_in_one_line(fake_model: str) -> None:
    with pytest.raises(
        EngineStartError, match="has no safetensors nor pytorch_model.bin"
    ) as caught:
        AsyncLLM.from_engine_args(EngineArgs(model=fake_model, device="cpu"))
    assert "\n" not in str(caught.value)


PROGRAM = """
import asyncio, sys
from sidestep import AsyncLLM, EngineArgs, SamplingParams
async def main():
    llm = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], device="fake", fake_step_ms=10.0,
                                               tensor_parallel_size=2))
    async for out in llm.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True)):
        print("running", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_program_ends_its_engine_ends_and_nothing_is_left(
    fake_model: str, tmp_path: Path, how: signal.Signals
) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, fake_model],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert program.stdout is not None and program.stdout.readline() == "running\n"
    children = psutil.Process(program.pid).children(recursive=True)
    assert len(children) == 3
    shared = [
        link
        for child in children
        for file in os.scandir(f"/proc/{child.pid}/fd")
        if (link := os.readlink(file)).startswith("/dev/shm/")
    ]
    assert [link for link in shared if not link.endswith(" (deleted)")] == [], (
        "memory that has a name may stay"
    )
    program.send_signal(how)
    program.stdout.close()
    assert program.wait(LIMIT_S) != 0
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []
    assert os.listdir(tmp_path) == []
