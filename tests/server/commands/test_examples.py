"""The programs in examples/ that are clients of a server, or are a server."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from tests.processes import run
from tests.server.live import ROOT, LiveServer

EXAMPLES = ROOT / "examples"
NODE = shutil.which("node")


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, str(EXAMPLES / "chat_client.py")],
        pytest.param(
            [NODE or "", str(EXAMPLES / "chat_client.mjs")],
            marks=pytest.mark.skipif(NODE is None, reason="there is no node"),
        ),
    ],
    ids=["python", "javascript"],
)
def test_a_chat_streams_and_remembers(command: list[str], tiny: LiveServer) -> None:
    before = tiny.metrics()
    done = run(*command, tiny.url, input="def get_name(\nclass Stack:\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("> ") and done.stdout.count("\n> ") >= 2 and len(done.stdout) > 50
    tokens, requests = (
        tiny.metrics()[name] - before.get(name, 0)
        for name in (
            "sidestep:prompt_tokens_total",
            'sidestep:http_responses_total{path="/v1/chat/completions",status="200"}',
        )
    )
    assert requests == 2
    apart = sum(
        tiny.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()["count"]
        for text in ("def get_name(", "class Stack:")
    )
    assert tokens > apart + 5, "the second prompt had the first, and its answer, in it"


class OnlyModels(BaseHTTPRequestHandler):
    """A server that knows its models, refuses each second request, and cuts the other answers."""

    protocol_version = "HTTP/1.1"
    posts = itertools.count()

    def do_GET(self) -> None:
        model = b'{"id": "m", "object": "model", "created": 0, "owned_by": "x"}'
        body = b'{"object": "list", "data": [' + model + b"]}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.close_connection = True
        if next(self.posts) % 2:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"10\r\ndata: ")

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[str]:
    """Yield the URL of a running backend."""
    process = subprocess.Popen(
        [sys.executable, EXAMPLES / "app_backend.py", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
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
    with httpx2.stream(
        "POST", f"{backend}/complete", json={"prompt": "def get_name("}, timeout=60
    ) as answer:
        pieces = list(answer.iter_text())
    assert answer.status_code == 200 and len("".join(pieces)) > 20 and len(pieces) > 1
    refused = httpx2.post(f"{backend}/complete", json={"prompt": ""}, timeout=60)
    assert refused.status_code == 400 and "prompt" in refused.json()["detail"]
    refused = httpx2.post(f"{backend}/complete", json={"prompt": "x", "max_tokens": 0}, timeout=60)
    assert refused.status_code == 400 and "max_tokens" in refused.json()["detail"]


def run_load(url: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, EXAMPLES / "load_test.py", url, "12", "40")


def test_a_load_is_served_whole(tiny: LiveServer) -> None:
    before = tiny.metrics()
    done = run_load(tiny.url)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"12 requests, 0 failed\nfirst piece: p50 [\d.]+ ms, p99 [\d.]+ ms\n"
        r"between pieces: p50 [\d.]+ ms, p99 [\d.]+ ms\n",
        done.stdout,
    )
    name = 'sidestep:http_responses_total{path="/v1/chat/completions",status="200"}'
    assert tiny.metrics()[name] - before.get(name, 0) == 12


def test_a_load_that_fails_says_so() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), OnlyModels) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run_load(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
    assert (done.returncode, done.stdout) == (1, "12 requests, 12 failed\n")
    assert "404" in done.stderr and "Connection error" in done.stderr
