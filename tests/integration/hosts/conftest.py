"""Hosts for tests: `sidestep node` as users run it, each with a loopback address of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidestep import AsyncLLM
from tests.processes import PYTHON_PATH

END_S = 30
MakeLLM = Callable[..., AsyncLLM]

Node = subprocess.Popen[bytes]
StartNode = Callable[..., Node]
"""Starts the agent of host N; further arguments are words of its command."""


@pytest.fixture
def invitation(tmp_path: Path) -> Path:
    """Return the path of the file that the head will write."""
    return tmp_path / "invitation"


@pytest.fixture
def start_node(invitation: Path) -> Iterator[StartNode]:
    """Return a function that starts the agent of host N, with the address 127.0.0.N."""
    started: list[Node] = []

    def start(number: int, *more: str) -> Node:
        words = ("--invitation", str(invitation), "--name", f"h{number}")
        started.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "sidestep", "node", *words),
                    *("--address", f"127.0.0.{number}", "--wait", "60"),
                    *more,
                ],
                env={**os.environ, "PYTHONPATH": PYTHON_PATH},
            )
        )
        return started[-1]

    yield start
    for node in started:
        node.kill()
        node.wait(END_S)


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
