"""A test process that dies costs the run the test it died in, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PASSING = """
import pytest
@pytest.mark.parametrize("number", range(4))
def test_passes(number): pass
"""
DYING = """
import os
def test_before(): pass
def test_dies(): os._exit(1)
def test_after(): pass
"""
CONFTEST = """
from tests.file_schedule import FileSchedule
def pytest_xdist_make_scheduler(config, log): return FileSchedule(config, log)
"""


def test_every_other_test_runs_once_where_two_processes_die(tmp_path: Path) -> None:
    """Processes die in an early file, with files left for others, and in the last one."""
    for name in "aceg":
        (tmp_path / f"test_{name}.py").write_text(PASSING)
    for name in "bh":
        (tmp_path / f"test_{name}.py").write_text(DYING)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    options = "-p xdist.plugin -n 2 --dist loadfile --no-loadscope-reorder -p no:cacheprovider -q"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split(), "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        # No other plugins: each of five processes would import them.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    failed = re.findall(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    assert sorted(failed) == ["test_b.py::test_dies", "test_h.py::test_dies"], run.stdout
    assert "2 failed, 20 passed" in run.stdout
