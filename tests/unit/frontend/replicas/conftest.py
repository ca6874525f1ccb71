"""An AsyncLLM of three replicas, each played by the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sidestep import AsyncLLM
from sidestep.frontend.input.tokenizer import Tokenizer
from tests.unit.frontend.fakes import FakeChannel, llm_of


@pytest.fixture
def channels() -> Iterator[list[FakeChannel]]:
    made = [FakeChannel() for _ in range(3)]
    yield made
    for channel in made:
        channel.close()


@pytest.fixture
def llm(channels: list[FakeChannel], tokenizer: Tokenizer) -> AsyncLLM:
    """Yield an AsyncLLM of three replicas."""
    return llm_of(channels[0], tokenizer, 100, *channels[1:])
