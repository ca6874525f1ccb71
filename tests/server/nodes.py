"""Hosts for tests: `sidestep node` as users run it, each with a loopback address of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import PYTHON_PATH

END_S = 30
Node = subprocess.Popen[bytes]


class Nodes:
    """The agents that a test has started."""

    def __init__(self, invitation: Path) -> None:
        """Start none yet. invitation: the file that the head will write."""
        self._invitation = invitation
        self._started: list[Node] = []

    def start(self, number: int, *more: str) -> Node:
        """Start the agent of host N, with the address 127.0.0.N. more: words of its command."""
        words = ("--invitation", str(self._invitation), "--name", f"h{number}")
        command = [
            *(sys.executable, "-m", "sidestep", "node", *words),
            *("--address", f"127.0.0.{number}", "--wait", "60"),
            *more,
        ]
        environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
        self._started.append(subprocess.Popen(command, env=environment))
        return self._started[-1]

    def close(self) -> None:
        """End all."""
        for node in self._started:
            node.kill()
            node.wait(END_S)
