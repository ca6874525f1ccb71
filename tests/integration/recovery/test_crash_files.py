"""Each death of a replica leaves a file that says what the replica did."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestep import AsyncLLM, EngineDeadError, SamplingParams
from sidestep.frontend.replicas.crash_file import Crash, read_crash
from sidestep.ipc.params.sampling_params import RequestOutputKind
from tests.waiting import until_idle, until_stats

MakeLLM = Callable[..., AsyncLLM]
LIMIT_S = 60.0


async def consume(llm: AsyncLLM, prompt: list[int], name: str, count: int) -> None:
    params = SamplingParams(
        max_tokens=count, ignore_eos=True, output_kind=RequestOutputKind.DELTA, n=2
    )
    async for _ in llm.generate(prompt, params, name):
        pass


def only_file(folder: Path) -> tuple[Path, Crash]:
    (path,) = folder.glob("*.json")
    return path, read_crash(str(path))


@pytest.mark.parametrize(
    ("victim", "number", "origin"),
    [
        ("worker_0", signal.SIGKILL, "worker"),
        ("core", signal.SIGKILL, "core"),
        ("worker_0", signal.SIGSTOP, "stall"),
        ("core", signal.SIGSTOP, "stall"),
    ],
)
async def test_the_file_names_the_cause_the_requests_and_the_step(
    make_llm: MakeLLM,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    victim: str,
    number: signal.Signals,
    origin: str,
) -> None:
    folder = tmp_path / "crashes"
    llm = make_llm(
        fake_step_ms=5.0, max_num_seqs=4, stall_limit=1.0, crash_dir=str(folder), num_kv_blocks=200
    )
    guest = AsyncLLM.join(await llm.invite())
    try:
        await consume(llm, [1, 2], "ended", 3)
        secret = [77] * 30
        tasks = [
            asyncio.create_task(consume(llm, secret, "one", 150)),
            asyncio.create_task(consume(guest, secret, "two", 150)),
            asyncio.create_task(consume(llm, [5] * 9, "three", 150)),
        ]
        await until_stats(llm, num_running=4, num_waiting=2)
        pids = llm.pids
        os.kill(pids[victim], number)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    finally:
        guest.shutdown()
    path, crash = only_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path) in caplog.text
    assert crash.origin == origin and crash.pids == [pids["core"], pids["worker_0"]]
    assert {r.request_id: (r.num_prompt_tokens, r.num_choices) for r in crash.requests} == {
        "one": (30, 2),
        "two": (30, 2),
        "three": (9, 2),
    }
    assert len({r.frontend for r in crash.requests}) == 2
    assert sum(r.scheduled_ns is None for r in crash.requests) == 1
    assert crash.flights and crash.flights[-1].num_running == 4
    assert crash.flights[0].step_id == crash.step_records[-1].step_id + 1
    assert crash.options["scheduler"]["max_num_seqs"] == 4 and "numpy" in crash.versions
    assert "77, 77" not in path.read_text().replace("77,77", "77, 77"), "tokens of a prompt"
    await until_idle(llm)


async def test_the_file_of_an_engine_that_stays_dead_can_be_shown(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(fake_step_ms=5.0, restart_limit=0, crash_dir=str(tmp_path))
    params = SamplingParams(
        max_tokens=2000, ignore_eos=True, output_kind=RequestOutputKind.DELTA, n=2
    )
    stream = llm.generate([1, 2], params, "one")
    for _ in range(10):
        await anext(stream)
    os.kill(llm.core_pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError) as caught:
        async for _ in stream:
            pass
    path, crash = only_file(tmp_path)
    assert str(path) in caplog.text
    assert str(tmp_path) not in str(caught.value), "clients elsewhere read it"
    assert [request.request_id for request in crash.requests] == ["one"]
    output = tmp_path / "trace.out"
    told = subprocess.run(
        [sys.executable, "-m", "sidestep", "trace", "--crash", str(path), "--output", str(output)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "was killed by SIGKILL" in told and "request one of frontend 0: ran for" in told
    assert f"step {crash.flights[0].step_id} was in flight: decode, 2 rows" in told
    events = json.loads(output.read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"death", "one", f"step {crash.flights[0].step_id} in flight"} <= names
    assert f"step {crash.step_records[-1].step_id}" in names
    assert all(event.get("ts", 0.0) >= -1e6 for event in events)


async def test_a_folder_that_cannot_be_written_ends_nothing(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    llm = make_llm(crash_dir=str(tmp_path / "file" / "crashes"))
    os.kill(llm.core_pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await consume(llm, [1, 2], "one", 5)
    assert "the crash file of replica 0 cannot be written" in caplog.text
