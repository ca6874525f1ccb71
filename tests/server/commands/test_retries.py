"""Clients ask a server that has no room again, and go on with an answer that they have in part."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sidestep.frontend.main import main
from tests.processes import run
from tests.server.live import ROOT, LiveServer

EXAMPLES = ROOT / "examples"
NODE = shutil.which("node")


class BusyServer(ThreadingHTTPServer):
    """A server that refuses its first requests, and answers all later ones."""

    daemon_threads = True

    def __init__(self, refusals: list[tuple[int, str | None]]) -> None:
        """Start to serve. refusals: status and Retry-After of each."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refusals = list(refusals)
        self.num_posts = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: BusyServer

    def do_GET(self) -> None:
        self._send(200, b'{"object": "list", "data": [{"id": "it", "object": "model"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.num_posts += 1
            refusal = self.server.refusals.pop(0) if self.server.refusals else None
        if refusal is not None:
            return self._send(refusal[0], b'{"error": {"message": "no room"}}', refusal[1])
        part = {"text": "hello"} if "chat" not in self.path else {"delta": {"content": "hello"}}
        choice = {"index": 0, "finish_reason": "length", **part}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        if "chat" in self.path:
            events.pop()  # nobody asks for it
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _send(self, status: int, body: bytes, retry_after: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(body)))
        if retry_after is not None:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def busy() -> Iterator[Callable[..., BusyServer]]:
    made: list[BusyServer] = []

    def make(*refusals: tuple[int, str | None]) -> BusyServer:
        made.append(BusyServer(list(refusals)))
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


CLIENTS = [
    pytest.param([sys.executable, str(EXAMPLES / "chat_client.py")], id="python"),
    pytest.param([sys.executable, str(EXAMPLES / "resume_client.py")], id="resume"),
    pytest.param(
        [NODE or "", str(EXAMPLES / "chat_client.mjs")],
        marks=pytest.mark.skipif(NODE is None, reason="there is no node"),
        id="javascript",
    ),
    pytest.param([sys.executable, "-m", "sidestep", "chat", "--url"], id="chat"),
]


@pytest.mark.parametrize("command", CLIENTS)
def test_a_client_asks_again_when_the_server_says(
    command: list[str], busy: Callable[..., BusyServer]
) -> None:
    server = busy((429, "0"), (503, "0"))
    done = run(*command, server.url, input="def f(\n")
    assert done.returncode == 0 and "hello" in done.stdout, done
    assert server.num_posts == 3


@pytest.mark.parametrize("command", CLIENTS)
def test_a_client_does_not_ask_for_ever(
    command: list[str], busy: Callable[..., BusyServer]
) -> None:
    server = busy(*[(503, "0")] * 20)
    done = run(*command, server.url, input="def f(\n")
    assert "hello" not in done.stdout
    assert 2 < server.num_posts < 10


def report_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    load = ["--num-prompts", "4", "--input-len", "4", "--output-len", "1", "--json"]
    assert main(["bench", "serve", *load, *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_a_load_counts_how_often_it_was_sent_back(
    busy: Callable[..., BusyServer], capsys: pytest.CaptureFixture[str]
) -> None:
    # Two requests before the load are not counted.
    server = busy()
    report = report_of(["--url", server.url], capsys)
    assert report["failed"] == 0 and server.num_posts == 2 + 4 and "retries" not in report
    server = busy(*[(429, "0")] * 5)
    report = report_of(["--url", server.url, "--max-retries", "5"], capsys)
    assert report["failed"] == 0 and server.num_posts == 2 + 4 + 5


def test_a_load_fails_as_it_did_where_nothing_says_when_to_ask_again(
    busy: Callable[..., BusyServer], capsys: pytest.CaptureFixture[str]
) -> None:
    server = busy(*[(429, None)] * 4)
    report = report_of(["--url", server.url], capsys)
    assert report["failed"] == 2 and server.num_posts == 2 + 4
    assert "no room" in report["failures"]
    server = busy(*[(429, "0")] * 100)
    report = report_of(["--url", server.url, "--max-retries", "2"], capsys)
    assert report["failed"] == 4 and report["retries"] == 8
    assert server.num_posts == (2 + 4) * 3
    server = busy(*[(503, "0")] * 100)
    report = report_of(["--url", server.url, "--max-retries", "0"], capsys)
    assert report["failed"] == 4 and server.num_posts == 6


# A stream that is lost.


class Cutting:
    """A proxy that cuts each of its first connections after a number of bytes of the answer."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port = port
        self._cuts = list(cuts)
        self.requests: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, socket.create_connection(("127.0.0.1", self._port)) as server:
                    self._pass_on(client, server)

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(1 << 16)
        self.requests.append(head.split()[1].decode())
        server.sendall(head)
        forward = threading.Thread(target=_copy, args=(client, server), daemon=True)
        forward.start()
        left = self._cuts.pop(0) if self._cuts else 1 << 30
        while left and (data := server.recv(min(left, 1 << 16))):
            client.sendall(data)
            left -= len(data)
        client.shutdown(socket.SHUT_RDWR)
        forward.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=str)
def test_ids_go_on_with_the_tokens_that_would_have_come(
    sampling: dict[str, Any], tiny: LiveServer
) -> None:
    messages = [{"role": "user", "content": "def get_name("}]
    fields = {**sampling, "ignore_eos": True, "return_token_ids": True}
    body = {"messages": messages, "max_tokens": 40, **fields}
    whole = tiny.post("/v1/chat/completions", body).json()
    prompt, tokens = whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
    for had in (1, 13, 39):
        rest = tiny.post(
            "/v1/completions",
            {"prompt": prompt + tokens[:had], "max_tokens": 40 - had, **fields},
        ).json()
        assert rest["choices"][0]["token_ids"] == tokens[had:]


@pytest.mark.parametrize("cuts", [[1200], [1500, 2000], [1, 2345, 900]], ids=str)
def test_an_answer_goes_on_after_a_lost_connection(cuts: list[int], tiny: LiveServer) -> None:
    """Cut the stream anywhere, also within an event: no text is missing, and none comes twice."""
    client = [sys.executable, str(EXAMPLES / "resume_client.py")]
    whole = run(*client, tiny.url, "def get_name(")
    assert whole.returncode == 0 and len(whole.stdout) > 100, whole.stderr
    proxy = Cutting(tiny.port, cuts)
    try:
        done = run(*client, proxy.url, "def get_name(")
    finally:
        proxy.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout == whole.stdout
    assert len(proxy.requests) == len(cuts) + 1
    assert proxy.requests[0] == "/v1/chat/completions"
    assert proxy.requests[-1] == "/v1/completions"
