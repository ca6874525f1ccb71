"""The process that compiles ahead: its results, and that no other process depends on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
import pytest

from sidestep.executor.gpu.warm_up import wait_for_compiler
from sidestep.executor.processes.kernel_compiler import Note
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import (
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.model.model_spec import load_model_spec, resolve_model_path
from sidestep.ipc.processes.process import spawn
from sidestep.kernels.gpu import Gpu

GPU = Gpu(90, 132)

FORKS = """
import os, sys, time
from types import SimpleNamespace
from sidestep.executor.processes.forks import Forks
from sidestep.kernels import compiling

def kernel(name):
    return SimpleNamespace(name=name, metadata_group={"x": f"/cache/{name}.json"})

compiling.Locks.with_launcher = lambda self, kernel: kernel  # there is none to make
def fail():
    raise ValueError("no such instruction")
def hang():
    os.write(1, b"hangs\\n")  # whole, where the other fork writes too
    time.sleep(1000)
forks = Forks(64)
def die():
    os.kill(os.getpid(), 9)
reader, writer = os.pipe()
def together():
    os.close(writer)
    os.read(reader, 1)  # until all have been forked
    return kernel("a")
tasks = {
    "good": lambda: kernel("a"), "fail": fail, "hang": hang, "die": die, "together": together
}
for what in sys.argv[1:]:
    forks.submit(tasks[what])
os.close(writer)
print(forks.finish())
"""


def worker_args() -> WorkerArgs:
    path = resolve_model_path(DEFAULT_MODEL, None)
    return WorkerArgs(
        rank=0,
        spec=load_model_spec(path),
        model=ModelConfig(),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        max_model_len=100,
    )


def start(*tasks: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FORKS, *tasks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_forks_name_what_they_made() -> None:
    process = start("good", "good", "good")
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.read() == f"{['/cache/a.json'] * 3}\n"
    process.communicate()


def test_no_result_is_lost_where_forks_end_together() -> None:
    for _ in range(10):
        process = start(*["together"] * 64)
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.read() == f"{['/cache/a.json'] * 64}\n"
        process.communicate()


@pytest.mark.parametrize(
    ("task", "cause"), [("fail", "ValueError: no such instruction"), ("die", "killed")]
)
def test_a_fork_that_fails_fails_all(task: str, cause: str) -> None:
    process = start("good", task, "good")
    assert process.stderr is not None
    assert f"RuntimeError: 1 of 3 failed: {cause}" in process.stderr.read()
    process.communicate()


def test_forks_end_with_the_engine() -> None:
    with start("hang", "hang") as process:
        assert process.stdin is not None and process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["hangs\n"] * 2
        forks = psutil.Process(process.pid).children()
        assert len(forks) == 2
        process.stdin.close()
        gone, alive = psutil.wait_procs(forks, timeout=20)
    assert (len(gone), alive) == (2, [])


def test_a_worker_goes_on_when_the_compiler_is_killed() -> None:
    compiled, compiling = os.pipe()
    child = spawn("compiler", "tests.unit.ipc.children:wait_for_ever", {}, pass_fds=(compiling,))
    os.close(compiling)
    os.kill(child.pid, signal.SIGKILL)
    wait_for_compiler(compiled)
    assert child.wait(20)


def test_a_worker_alone_waits_for_nobody() -> None:
    wait_for_compiler(None)


def test_a_note_holds_as_long_as_all_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
    note = Note(worker_args(), GPU)
    assert not note.holds()
    note.write([str(file) for file in files])
    assert Note(worker_args(), GPU).holds()
    files[1].unlink()
    assert not note.holds()


def test_a_note_is_of_shapes_and_the_gpu_but_of_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    args = worker_args()
    Note(args, GPU).write([])
    assert Note(
        replace(
            args,
            model=ModelConfig(model="/elsewhere"),
            rendezvous="/tmp/x",
            spec=msgspec.structs.replace(args.spec, path="/elsewhere"),
        ),
        GPU,
    ).holds()
    assert Note(replace(args, start=2, after=(4711, 4712)), GPU).holds()  # a restart
    assert not Note(args, Gpu(90, 114)).holds()
    assert not Note(replace(args, max_model_len=101), GPU).holds()
    assert not Note(
        replace(args, spec=msgspec.structs.replace(args.spec, vocab_size=7)), GPU
    ).holds()
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    assert not Note(args, GPU).holds()
