"""examples/scaling.py reports the gain of each way to scale, and some way gains something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.processes import run

EXAMPLE = Path(__file__).parents[3] / "examples" / "scaling.py"


def test_each_way_pays_for_what_it_is_for() -> None:
    done = run(sys.executable, EXAMPLE)
    assert done.returncode == 0, done.stderr
    best, vote, revised = done.stdout.splitlines()
    average, top = map(int, re.findall(r"(\d+)%", best))
    assert average < top == 100, (
        "a completion that parses is among them, and a single one would be worse"
    )
    agreeing, counted, stopped = map(int, re.findall(r"\b(\d+)\b", re.sub("'.*'", "", vote)))
    assert agreeing > 9 // 2 and counted + stopped == 9 and stopped > 0, (
        "the end was known before all had ended"
    )
    drafts, cached = map(int, re.findall(r"(\d+)", revised))
    assert drafts == 2 and cached > 40, "later turns compute only what is new of them"
