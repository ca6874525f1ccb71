"""These tests need an NVIDIA GPU and are skipped where there is none."""

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
    """The references run on the CPU, and are so small that threads would only wait for one
    another.
    """
    torch.set_num_threads(1)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder for a model of token ids: it has a tokenizer, as every folder must, but nobody uses
    it.
    """
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path
