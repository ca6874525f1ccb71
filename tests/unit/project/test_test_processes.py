"""The tests' own processes: they run in a background shell.

A test that hangs in any event loop is ended.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTEST = f"'{sys.executable}' -m pytest -q -p no:cacheprovider -c pyproject.toml --rootdir ."
HANGS = """
import uvloop

async def wait():
    import asyncio
    await asyncio.get_running_loop().create_future()

def test_hangs():
    uvloop.run(wait())
"""


def run_in_shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's command without a terminal."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=100,
    )


def test_ctrl_c_reaches_what_is_tested_where_it_is_ignored_and_input_is_closed() -> None:
    tests = "tests/unit/frontend/cli/test_chat.py tests/unit/project/test_test_processes.py"
    done = run_in_shell(
        f"trap '' INT; {PYTEST} --timeout 60 {tests} -k 'ctrl_c_stops or input_is_open' <&-"
    )
    assert done.returncode == 0, done.stdout


def test_standard_input_is_open() -> None:
    assert Path("/proc/self/fd/0").exists() or sys.platform != "linux"


def test_a_test_that_hangs_in_uvloop_is_ended(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    done = run_in_shell(f"{PYTEST} --timeout 1 '{tmp_path}'")
    assert done.returncode != 0 and "Timeout" in done.stdout, done.stdout
