"""Before anything imports Triton: without a GPU its kernels run in its interpreter, so the same tests serve both."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.threads import one_torch_thread

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """--screenshots: the docs' pictures are made by the tests of the page, but only when they are asked for."""
    parser.addoption("--screenshots", metavar="FOLDER", help="where test_page.py writes the docs' pictures")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For the tests of a file."""
    with one_torch_thread():
        yield
