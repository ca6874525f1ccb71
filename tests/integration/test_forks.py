"""Programs that fork with an engine.

The engine stays with the process that started it, and calls in a child fail at once with that
reason.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import psutil
import pytest

from sidestep import AsyncLLM, SamplingParams
from tests.processes import PYTHON_PATH, ROOT, is_alive
from tests.waiting import until_idle

MakeLLM = Callable[..., AsyncLLM]
REFUSAL = "cannot use it: make the engine after the fork"

SYNCHRONOUS = """
import os, signal, sys
from sidestep import LLM, SamplingParams, SidestepError

def refused(call):
    try:
        call()
    except SidestepError as error:
        return str(error)
    return "not refused"

with LLM(sys.argv[1], device="fake", data_parallel_size=2) as llm:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ask = lambda: llm.generate([5, 6], params, use_tqdm=False)
    ask()
    if os.fork() == 0:
        chat = lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        for call in (ask, chat, llm.get_stats, llm.shutdown):
            print(refused(call), flush=True)
        sys.exit(7)  # through the end of the block, and the finalizers
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    print(len(ask()[0].outputs[0].token_ids), flush=True)
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    print(*(pid for name, pid in llm.pids.items() if name != "frontend"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""

ASYNCHRONOUS = """
import asyncio, multiprocessing, os, sys
from sidestep import AsyncLLM, EngineArgs, SamplingParams, SidestepError
from sidestep.frontend.api.event_loop import new_event_loop

params = SamplingParams(max_tokens=200, ignore_eos=True)

async def refused(call):
    try:
        await call()
    except SidestepError as error:
        return str(error)
    return "not refused"

async def in_child(llm, stream):
    for call in (lambda: anext(llm.generate([5, 6])), lambda: anext(stream),
                 lambda: llm.abort("x"), lambda: llm.tokenize("x"), llm.get_stats,
                 llm.check_health, llm.invite, llm.wait_dead):
        print(await refused(call), flush=True)

async def main():
    llm = AsyncLLM.from_engine_args(EngineArgs(model=sys.argv[1], device="fake", fake_step_ms=1))
    async with llm:
        stream = llm.generate([5, 6], params)
        await anext(stream)
        child = multiprocessing.get_context("fork").Process(
            target=lambda: asyncio.run(in_child(llm, llm.generate([7]))))
        child.start()
        await asyncio.to_thread(child.join)
        print(child.exitcode, flush=True)
        if os.fork() == 0:
            await in_child(llm, stream)
            sys.exit(3)  # through the copy of the running loop
        print(os.waitstatus_to_exitcode((await asyncio.to_thread(os.wait))[1]), flush=True)
        async for output in stream:
            pass
        print(len(output.outputs[0].token_ids), flush=True)

factory = new_event_loop if sys.argv[2] == "uvloop" else asyncio.new_event_loop
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""

GUEST = """
import asyncio, os, signal, sys
from sidestep import AsyncLLM, SamplingParams

async def main():
    llm = AsyncLLM.join(sys.stdin.readline())
    stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=1900, ignore_eos=True))
    await anext(stream)
    if os.fork() == 0:
        sys.stdin.readline()
        os._exit(0)
    print("forked", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@contextmanager
def program(source: str, *words: str) -> Iterator[tuple[IO[str], subprocess.Popen[str]]]:
    """Yield a program with the lines that it prints.

    Its children end with its standard input, here at the latest.
    """
    # Newer versions of Python warn of every fork of a process with threads.
    words = ("-X", "dev", "-W", "ignore::DeprecationWarning", "-c", source, *words)
    with subprocess.Popen(
        (sys.executable, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            yield process.stdout, process
        except BaseException:
            process.kill()
            sys.stderr.write(process.stderr.read())  # for the report of the failure
            raise
        finally:
            process.kill()


def lines(out: IO[str], count: int) -> list[str]:
    return [out.readline().strip() for _ in range(count)]


def errors_of(process: subprocess.Popen[str]) -> str:
    """Return the text that the process has printed on standard error.

    asyncio's debug mode reports slow callbacks there.
    """
    assert process.stderr is not None
    return "".join(line for line in process.stderr if not line.startswith("Executing <"))


def test_children_are_refused_and_the_engine_ends_with_its_own_process(fake_model: str) -> None:
    with program(SYNCHRONOUS, fake_model) as (out, process):
        assert [REFUSAL in line for line in lines(out, 4)] == [True] * 4
        assert lines(out, 2) == ["7", "4"]  # the child's status, and the parent's next answer
        engine = [psutil.Process(pid) for pid in map(int, out.readline().split())]
        assert len(engine) == 4
        process.wait(30)
        # The second child lives until the end of its standard input, which is still open.
        psutil.wait_procs(engine, 30)
        assert not any(is_alive(each.pid) for each in engine)
        assert process.stdin is not None
        process.stdin.close()
        assert errors_of(process) == ""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_fork_while_the_loop_runs_harms_no_stream(loop: str, fake_model: str) -> None:
    with program(ASYNCHRONOUS, fake_model, loop) as (out, process):
        assert [REFUSAL in line for line in lines(out, 8)] == [True] * 8
        assert lines(out, 1) == ["0"]
        assert [REFUSAL in line for line in lines(out, 8)] == [True] * 8
        assert lines(out, 2) == ["3", "200"]
        assert process.wait(30) == 0
        assert errors_of(process) == ""


async def test_a_joined_frontend_ends_though_a_child_of_it_lives(make_llm: MakeLLM) -> None:
    llm = make_llm(fake_step_ms=5, max_model_len=2048)
    invitation = await llm.invite()
    with program(GUEST) as (out, process):
        assert process.stdin is not None
        process.stdin.write(invitation + "\n")
        process.stdin.flush()
        assert await asyncio.to_thread(lines, out, 1) == ["forked"]
        await until_idle(llm)
        (lost,) = [record for record in await llm.get_request_records() if record.client == 1]
        assert lost.finish_reason == "abort" and lost.num_output_tokens < 1900
        async for output in llm.generate([5], SamplingParams(max_tokens=3, ignore_eos=True)):
            pass
        assert len(output.outputs[0].token_ids) == 3
