"""A stream whose request waits in the queue.

Its head comes at once, then comments come until the first token.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.live import ANSWER_S, LiveServer, raw_request, read_all, read_until

LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
SHORT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def narrow(fake_model: str) -> Iterator[LiveServer]:
    """Start a server that runs one request at a time."""
    with LiveServer(
        fake_model,
        "--served-model-name",
        "fake",
        "--device",
        "fake",
        "--fake-step-ms",
        "5",
        "--max-num-seqs",
        "1",
        "--max-num-queued-reqs",
        "3",
        "--stream-comments",
        "0.05",
    ) as server:
        yield server


@pytest.fixture
def busy(narrow: LiveServer) -> Iterator[socket.socket]:
    """Send a long request, which occupies the server. Closing the connection ends it."""
    connection = send(narrow, "/v1/completions", LONG)
    read_until(connection, b"data: ")
    with connection:
        yield connection
    narrow.until_idle()


def send(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    connection = server.connect()
    connection.sendall(raw_request(path, json.dumps(body).encode(), Connection="close"))
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHORT),
        ("/v1/completions", {**SHORT, "prompt": ["a", "b"]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True},
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "stream": True}),
    ],
)
def test_a_waiting_stream_is_kept_alive(
    path: str, body: dict[str, Any], narrow: LiveServer, busy: socket.socket
) -> None:
    with send(narrow, path, body) as waiting:
        data = read_until(waiting, b": waiting\n\n", 3)
        assert (
            data.startswith(b"HTTP/1.1 200 ")
            and b"text/event-stream" in data
            and b"data:" not in data
        )
        assert narrow.load()["num_waiting"] >= 1
        busy.close()
        data = read_all(waiting)
    assert b"data: " in data and (
        b"[DONE]" in data or b"response.completed" in data or b"incomplete" in data
    )


def test_the_client_libraries_pass_over_the_comments(
    narrow: LiveServer, busy: socket.socket
) -> None:
    with (
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", timeout=ANSWER_S) as client,
        client.completions.create(
            model="fake", prompt="hi", max_tokens=3, stream=True, extra_body={"ignore_eos": True}
        ) as stream,
    ):
        assert stream.response.status_code == 200  # the head has come; the request waits
        busy.close()
        chunks = list(stream)
    assert chunks and chunks[-1].choices[0].finish_reason == "length"


def test_what_is_known_at_once_has_its_own_status(narrow: LiveServer, busy: socket.socket) -> None:
    assert narrow.post("/v1/completions", {**SHORT, "prompt": [10**6]}).status_code == 400
    assert narrow.post("/v1/completions", {**SHORT, "best_of": 9}).status_code == 400
    waiting = [send(narrow, "/v1/completions", SHORT) for _ in range(3)]
    try:
        narrow.until(lambda load: load["num_waiting"] == 3)
        full = narrow.post("/v1/completions", SHORT)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        several = narrow.post("/v1/completions", {**SHORT, "prompt": ["a", "b"]})
        assert several.status_code == 429
    finally:
        for connection in waiting:
            connection.close()


def test_without_comments_only_the_head_comes_at_once(make_server: Any) -> None:
    server = make_server("--max-num-seqs", "1", "--stream-comments", "0", step_ms=5)
    with send(server, "/v1/completions", LONG) as running:
        read_until(running, b"data: ")
        with send(server, "/v1/completions", SHORT) as waiting:
            head = read_until(waiting, b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            running.close()
            data = head + read_all(waiting)
    assert b": waiting" not in data and b"[DONE]" in data
