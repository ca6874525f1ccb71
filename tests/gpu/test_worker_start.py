"""The start of a worker beside the process that compiles for it.

The worker compiles nothing itself, and nothing at all is compiled once it serves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.models import write_model
from tests.processes import PYTHON_PATH, ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["qwen3-tied", "llama-biases", "mistral-window"])
def test_a_worker_compiles_nothing_itself(family: str, dtype: str, tmp_path: Path) -> None:
    model = write_model(family, tmp_path / "model")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.worker_start", model, dtype],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    at_start, later = json.loads(done.stdout.splitlines()[-1])
    assert (at_start, later) == ([], [])
