"""Hosts that join, for engines on the fake device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidestep import AsyncLLM
from tests.server.nodes import Node, Nodes

MakeLLM = Callable[..., AsyncLLM]
StartNode = Callable[..., Node]
"""Starts the agent of host N; further arguments are words of its command."""


@pytest.fixture
def invitation(tmp_path: Path) -> Path:
    """Return the path of the file that the head will write."""
    return tmp_path / "invitation"


@pytest.fixture
def start_node(invitation: Path) -> Iterator[StartNode]:
    """Yield a function that starts an agent; all are ended after the test."""
    nodes = Nodes(invitation)
    yield nodes.start
    nodes.close()


@pytest.fixture
def make_joined(make_llm: MakeLLM, invitation: Path) -> MakeLLM:
    """Return a function that makes an engine whose hosts join."""

    def make(**options: object) -> AsyncLLM:
        return make_llm(
            **{
                "placer": "join",
                "head_address": "127.0.0.1:0",
                "invitation_file": str(invitation),
                "placer_timeout": 60.0,
                "data_parallel_size": 2,
                **options,
            }
        )

    return make
