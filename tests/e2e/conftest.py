"""What the tests of whole engines use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tests.threads import one_torch_thread


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder for a model of token ids: it has a tokenizer, as every folder must, but nobody uses it."""
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    return tmp_path
