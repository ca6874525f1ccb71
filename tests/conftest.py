"""Settings of all tests: the initial state of a test process, and the number of processes.

They are set before anything imports Triton. Without a GPU, Triton's kernels run in its interpreter,
so the same tests serve both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from sidestep.ipc.config import cache_folder_of_environment, exact_products_environment
from sidestep.kernels.native.library import keep_in

# Before torch loads its libraries: tests run models in their own process too, beside other tests.
os.environ.update(exact_products_environment(), GOMP_SPINCOUNT="100")

import torch
from xdist.remote import Producer

from tests.file_schedule import FileSchedule
from tests.process_state import open_standard_input, take_interrupts
from tests.threads import one_torch_thread

take_interrupts()
open_standard_input()
keep_in(cache_folder_of_environment())

BYTES_PER_PROCESS = 5 << 30
"""Memory that one test process may need, with the servers that its tests start."""
MOST_PROCESSES = 8

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --screenshots, which makes the tests of the page write the docs' pictures.

    Add --fault-plans, the number of random fault plans that are run.
    """
    parser.addoption(
        "--screenshots", metavar="FOLDER", help="where test_page.py writes the docs' pictures"
    )
    parser.addoption(
        "--fault-plans", type=int, default=50, metavar="N", help="run the first N fault plans"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes that `-n auto` starts.

    It is zero where tests share a GPU: then they all run in this process. Elsewhere it is one and a
    half times the number of cores, since tests of servers mostly wait.
    """
    if torch.cuda.is_available():
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory: int = psutil.virtual_memory().available
    return max(1, min(cores * 3 // 2, MOST_PROCESSES, memory // BYTES_PER_PROCESS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileSchedule | None:
    """Return the schedule by files that goes on when a test process dies."""
    return FileSchedule(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what engines leave behind, such as crash files, out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread for the tests of a file."""
    with one_torch_thread():
        yield
