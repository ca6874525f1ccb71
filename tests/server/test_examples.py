"""The programs in examples/ that speak to a server, or are one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import httpx2
import pytest

from tests.server.live import ROOT, LiveServer

EXAMPLES = ROOT / "examples"
NODE = shutil.which("node")


@pytest.mark.parametrize("command", [
    [sys.executable, str(EXAMPLES / "chat_client.py")],
    pytest.param([NODE or "", str(EXAMPLES / "chat_client.mjs")],
                 marks=pytest.mark.skipif(NODE is None, reason="there is no node"))], ids=["python", "javascript"])
def test_a_chat_streams_and_remembers(command: list[str], tiny: LiveServer) -> None:
    before = tiny.metrics()
    done = subprocess.run([*command, tiny.url], input="def get_name(\nclass Stack:\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("> ") and done.stdout.count("\n> ") >= 2 and len(done.stdout) > 50
    tokens, requests = (tiny.metrics()[name] - before.get(name, 0) for name in (
        "sidestep:prompt_tokens_total", 'sidestep:http_responses_total{path="/v1/chat/completions",status="200"}'))
    assert requests == 2
    apart = sum(tiny.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["count"]
                for text in ("def get_name(", "class Stack:"))
    assert tokens > apart + 5, "the second prompt had the first, and its answer, in it"


@pytest.fixture
def backend() -> Iterator[str]:
    """The URL of a backend that runs."""
    process = subprocess.Popen([sys.executable, EXAMPLES / "app_backend.py", "0"], stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert process.stderr is not None
    log = ""
    for line in process.stderr:
        log += line
        if (found := re.search(r"running on (http://\S+)", line)) is not None:
            yield found[1]
            break
    process.terminate()
    log += process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in log and "running on" in log, log


def test_a_backend_streams_from_the_engine_inside_it(backend: str) -> None:
    with httpx2.stream("POST", f"{backend}/complete", content=b"def get_name(", timeout=60) as answer:
        pieces = list(answer.iter_text())
    assert answer.status_code == 200 and len("".join(pieces)) > 20 and len(pieces) > 1
    refused = httpx2.post(f"{backend}/complete", content=b"", timeout=60)
    assert refused.status_code == 400 and "prompt" in refused.json()["error"]
