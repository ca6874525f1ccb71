"""Fixtures of the tests of whole engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedModel

from tests.e2e.engines import Engines
from tests.e2e.models import RandomModel, load_reference, write_model
from tests.threads import one_torch_thread


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


def write_tokenizer(folder: Path) -> Path:
    """Write an empty tokenizer into a model's folder.

    Every model's folder must have one, although the tests send token ids to these models.
    """
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return folder


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Return a folder for a model that the test changes."""
    return write_tokenizer(tmp_path)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    """Return a function that gives a family's random model.

    It returns the model's folder, and the model as transformers runs it. Both are made once, so
    tests must not change them.
    """

    @cache
    def make(family: str) -> tuple[str, PreTrainedModel]:
        path = write_model(family, write_tokenizer(tmp_path_factory.mktemp(family)))
        return path, load_reference(path)

    return make


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Yield the engines that the tests of a file share."""
    shared = Engines()
    yield shared
    shared.close()
