"""What several tests of runners use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sidestep.executor.model_runner import ModelRunner
from tests.e2e.models import write_model
from tests.unit.executor.test_model_runner import make_runner


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return make_runner(write_model("llama-gqa", tmp_path))
