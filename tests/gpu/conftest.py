"""Fixtures of tests that need an NVIDIA GPU and are skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Limit torch to one thread on the CPU.

    The references run there, and are so small that threads would only wait for one another.
    """
    torch.set_num_threads(1)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Return a folder for a model of token ids.

    It has a tokenizer, as every folder must, but the tests do not use it.
    """
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path
