"""Scripts as users of vLLM write them.

With the import changed they run, or end with one sentence.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import pytest

import sidestep

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "vllm_scripts").rglob("*.py"))


def ported(script: Path) -> str:
    """Return a script's text with nothing but the import changed."""
    return re.sub(r"\bvllm\b", "sidestep", script.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_runs_with_the_import_changed_or_says_why_not(
    script: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code = ported(script)
    expected = re.match(r"# Expected: (.*)\n", code)
    assert expected is not None
    device = "cpu" if expected[1] == "runs on cpu" else "fake"
    monkeypatch.setattr(sys, "argv", [str(script), sidestep.DEFAULT_MODEL, device])
    names = {"__name__": "__main__"}
    try:
        exec(compile(code, str(script), "exec"), names)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        assert told.startswith(expected[1]), told
        assert "\n" not in told and len(told) < 300
    else:
        assert expected[1] in ("runs", "runs on cpu")
    finally:
        names.clear()
        gc.collect()  # ends the script's engines


def test_there_are_28_and_more_than_half_run() -> None:
    runs = [script for script in SCRIPTS if "# Expected: runs" in script.read_text()]
    assert len(SCRIPTS) >= 28 and 2 * len(runs) > len(SCRIPTS)
