"""Fixtures of several tests of runners."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidestep.executor.cpu.cpu_runner import ModelRunner
from tests.e2e.models import write_model
from tests.unit.executor.test_model_runner import make_runner


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    return make_runner(write_model("llama-gqa", tmp_path))
