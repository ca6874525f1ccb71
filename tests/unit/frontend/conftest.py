from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestep import DEFAULT_MODEL, AsyncLLM
from sidestep.frontend.input.tokenizer import Tokenizer
from tests.unit.frontend.desk import Desk
from tests.unit.frontend.fakes import FakeChannel, llm_of


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEFAULT_MODEL)


@pytest.fixture
def desk(tokenizer: Tokenizer) -> Desk:
    """Return a processor of outputs whose core is the test."""
    return Desk(tokenizer)


@pytest.fixture
def channel() -> Iterator[FakeChannel]:
    channel = FakeChannel()
    yield channel
    channel.close()


@pytest.fixture
def llm(channel: FakeChannel, tokenizer: Tokenizer) -> AsyncLLM:
    """Yield an AsyncLLM whose core is the test."""
    return llm_of(channel, tokenizer)
