"""Sums through one another's memory on several GPUs, in graphs of a thousand replays.

All ranks get the same bits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.models import random_prompts, write_model
from tests.e2e.test_parity import engine_tokens
from tests.processes import PYTHON_PATH, ROOT


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, "bfloat16"),
        (2, "float16"),
        (2, "float32"),
        (3, "bfloat16"),
        (4, "bfloat16"),
        (4, "float32"),
        (8, "bfloat16"),
    ],
)
def test_graphs_of_sums(ranks: int, dtype: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    meet = str(tmp_path / "meet")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.sums.sum_ranks", str(rank), str(ranks), meet, dtype],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": PYTHON_PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        assert process.returncode == 0, errors[-4000:]
    digests = {out.splitlines()[-1] for out, _ in said}
    assert len(digests) == 1, "ranks have different bits"


@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"disable_custom_all_reduce": True}], ids=str
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one(
    ranks: int, options: dict[str, bool], model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Cover four ranks with two KV heads, and a vocabulary that is no multiple of the ranks."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    path = write_model("llama-gqa", model_folder)
    prompts, counts = random_prompts(8, 331), [12] * 8
    base = {
        "device": "cuda",
        "dtype": "float32",
        "cpu_threads": None,
        "kv_cache_memory_bytes": 1 << 30,
    }
    one = engine_tokens(path, prompts, counts, **base)
    assert (
        engine_tokens(path, prompts, counts, **base, tensor_parallel_size=ranks, **options) == one
    )
    assert "sum through torch.distributed" not in capfd.readouterr().err, (
        "these GPUs reach one another"
    )
