"""The running processes: their number, their names and their libraries."""

import os
import subprocess
import sys

import psutil
import pytest

from sidestep import AsyncLLM, EngineArgs
from tests.processes import cores


def imported_by(program: str, *names: str) -> list[str]:
    """Run a program in a process of its own, and return those of the modules that it imports."""
    program += f"\nimport sys\nprint(*(name for name in {names} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "module",
    [
        "sidestep",
        "sidestep.frontend.api.async_llm",
        "sidestep.frontend.api.llm",
        "sidestep.frontend.main",
        "sidestep.engine_core.entry",
        "sidestep.engine_core.proc",
        "sidestep.executor.hosts.multiproc",
        "sidestep.executor.runner.fake",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    assert imported_by(f"import {module}", "torch", "transformers", "triton") == []


def test_a_frontend_imports_what_is_only_for_chats_while_the_engine_starts() -> None:
    assert imported_by("import sidestep.frontend.api.llm", "jinja2") == []


def test_the_core_launches_workers_before_it_imports_numpy() -> None:
    """A worker needs longest, and waits for all that the core imports before it launches it."""
    program = (
        "from sidestep.engine_core import entry\n"
        "entry.registry.load(entry.registry.EXECUTORS['multiproc'])"
    )
    assert imported_by(program, "numpy", "asyncio") == []


SERVE = """
import sys
from sidestep.frontend.cli import serve
from sidestep.frontend.main import main
def start(arguments, meanwhile):
    print("sidestep.frontend.server.app" in sys.modules)
    meanwhile()
    print("sidestep.frontend.server.app" in sys.modules)
    raise SystemExit
serve.start_engine = start
main(["serve", "--port", "0"])
"""


def test_a_server_is_imported_while_the_engine_starts() -> None:
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_fails_while_the_engine_starts_ends_its_processes() -> None:
    before, started = cores(os.getpid()), list[psutil.Process]()

    def fail() -> None:
        started.extend(core for core in cores(os.getpid()) if core not in before)
        raise ImportError("a library is missing")

    config = EngineArgs(device="fake").create_engine_config()
    with pytest.raises(ImportError, match="a library is missing"):
        AsyncLLM(config, meanwhile=fail)
    assert len(started) == 1
    assert psutil.wait_procs(started, timeout=10)[1] == []


def maps_torch(pid: int) -> bool:
    """Return whether the process has torch's library mapped.

    That is true as soon as anything in it has imported torch.
    """
    return any("libtorch" in entry.path for entry in psutil.Process(pid).memory_maps())


async def test_the_running_frontend_and_core_have_not_loaded_torch_and_the_worker_has(
    tiny_llm: AsyncLLM,
) -> None:
    async for _ in tiny_llm.generate("def get_name("):
        pass
    core = psutil.Process(tiny_llm.core_pid)
    assert not maps_torch(core.pid)
    assert [maps_torch(worker.pid) for worker in core.children()] == [True]
    # This process may have loaded torch for other tests; a fresh one that streams must not.
    done = subprocess.run(
        [sys.executable, "-c", FRONTEND], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["tokens:", "16", "torch:", "False"]


FRONTEND = """
import asyncio, sys
from sidestep import AsyncLLM, EngineArgs, SamplingParams
async def main():
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    async with AsyncLLM.from_engine_args(EngineArgs()) as llm:
        async for out in llm.generate("def get_name(", params):
            pass
    print("tokens:", len(out.outputs[0].token_ids), "torch:", "torch" in sys.modules)
asyncio.run(main())
"""
