"""Settings of all tests: the state that a test process starts in, and how many processes run them.

Before anything imports Triton: without a GPU its kernels run in its interpreter, so the same tests
serve both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest

from sidestep.ipc.config import exact_products_environment

os.environ.update(
    exact_products_environment()
)  # before torch loads MKL: tests run models in their own process too

import torch

from tests.process_state import open_standard_input, take_interrupts
from tests.threads import one_torch_thread

take_interrupts()
open_standard_input()

BYTES_PER_PROCESS = 5 << 30
"""Memory that one test process may need, with the servers that its tests start."""
MOST_PROCESSES = 8

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--screenshots: the docs' pictures are made by the tests of the page, but only when they are
    asked for.
    """
    parser.addoption(
        "--screenshots", metavar="FOLDER", help="where test_page.py writes the docs' pictures"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many test processes `-n auto` starts: none beside this one where tests share a
    GPU.

    Half as many again as cores, since tests of servers mostly wait.
    """
    if torch.cuda.is_available():
        return 0
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    memory: int = psutil.virtual_memory().available
    return max(1, min(cores * 3 // 2, MOST_PROCESSES, memory // BYTES_PER_PROCESS))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For the tests of a file."""
    with one_torch_thread():
        yield
