"""Collectives: the identity on one rank, the same answer on each of two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from sidestep.executor.parallel.parallel_state import Parallel


def test_one_rank_needs_no_group() -> None:
    parallel, x = Parallel(), torch.ones(2, 3)
    assert parallel.all_reduce(x) is x
    assert parallel.all_gather(x) is x
    assert parallel.minimum(7) == 7


def test_two_ranks_agree(tmp_path: Path) -> None:
    """Block ids are common to all ranks, so every rank must know the smallest cache."""
    child, meeting = str(Path(__file__).with_name("ranks.py")), str(tmp_path / "meet")
    ranks = [
        subprocess.Popen(
            [sys.executable, child, str(rank), "2", meeting], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=60)[0].splitlines() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    answers = [json.loads(lines[-1]) for lines in said]
    assert (
        answers[0]
        == answers[1]
        == {
            "minimum": 30,
            "sum": [3.0, 10.0],
            "has peers": False,
            "gathered": [[0.0, 1.0], [0.0, 1.0]],
        }
    )
    logged = [line for lines in said for line in lines if line.startswith("LOG")]
    assert len(logged) == 1 and "ranks sum through torch.distributed" in logged[0], (
        "said once, with the reason"
    )
