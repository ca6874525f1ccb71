from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from sidestep import DEFAULT_MODEL, AsyncLLM
from sidestep.frontend.output_processor import OutputProcessor
from sidestep.frontend.tokenizer import Tokenizer
from sidestep.ipc.config import FrontendConfig
from sidestep.ipc.messages import AbortRequests, Ready
from tests.unit.frontend.fakes import FakeChannel, client_of, input_processor


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEFAULT_MODEL)


@pytest.fixture
def channel() -> Iterator[FakeChannel]:
    channel = FakeChannel()
    yield channel
    channel.close()


@pytest.fixture
def llm(channel: FakeChannel, tokenizer: Tokenizer) -> AsyncLLM:
    """An AsyncLLM whose core is the test."""
    made = AsyncLLM.__new__(AsyncLLM)
    llm: Any = made
    llm._client = client_of(channel)
    llm._outputs = OutputProcessor(lambda handles: llm._client.send(AbortRequests(client=0, handles=handles)))
    llm._client._on_outputs = llm._outputs.handle
    llm._client._on_death = llm._outputs.fail_all
    llm._finalizer = weakref.finalize(llm, llm._client.close)
    llm._tokenizer = tokenizer
    llm._inputs = input_processor(tokenizer)
    llm._handles = itertools.count()
    llm._limits = FrontendConfig()
    llm._preparing = {}
    llm._ready = Ready(max_model_len=100, num_kv_blocks=9, block_size=16, device="fake", core_pid=0, worker_pids=[])
    return made
