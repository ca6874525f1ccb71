"""Clients that go away at any moment, and clients that send nonsense.

The server goes on, and keeps nothing of them.
"""

from __future__ import annotations

import json
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.live import LiveServer, raw_request, read_all, read_until

BODY: dict[str, Any] = {
    "prompt": "a prompt that is a little longer than one block of the cache",
    "max_tokens": 1900,
    "ignore_eos": True,
}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": BODY["prompt"]}],
    "max_tokens": 1900,
    "ignore_eos": True,
}


def still_serves(server: LiveServer) -> None:
    server.until_idle()
    assert (
        server.post(
            "/v1/completions", {"prompt": "hi", "max_tokens": 3, "ignore_eos": True}
        ).status_code
        == 200
    )
    assert server.http.get("/health").status_code == 200


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Close the sending side of the connection.

    To a server of requests that is the end of the client.
    """
    connection.shutdown(socket.SHUT_WR)
    read_all(connection)
    connection.close()


WAYS: dict[str, Callable[[socket.socket], None]] = {
    "close": lambda connection: connection.close(),
    "reset": reset,
    "half-close": half_close,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "stage",
    ["connected", "half of the head", "head", "half of the body", "sent", "running", "first event"],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {**BODY, "n": 4}),
    ],
    ids=["text", "chat", "n=4"],
)
def test_a_client_may_leave_at_any_stage(
    path: str, body: dict[str, Any], stage: str, way: str, fake: LiveServer
) -> None:
    for stream in (False, True):
        if stage == "first event" and not stream:
            continue
        data = raw_request(path, json.dumps({**body, "stream": stream}).encode())
        head = data.index(b"\r\n\r\n") + 4
        sent = {
            "connected": 0,
            "half of the head": head // 2,
            "head": head,
            "half of the body": (head + len(data)) // 2,
        }
        connection = fake.connect()
        connection.sendall(data[: sent.get(stage, len(data))])
        if stage == "running":
            fake.until(lambda load: load["num_running"] == body.get("n", 1))
        if stage == "first event":
            read_until(connection, b"data: ")
        WAYS[way](connection)
        fake.until_idle()
    still_serves(fake)


def test_a_second_request_on_the_same_connection_waits_for_the_first(fake: LiveServer) -> None:
    first, second = (
        {"prompt": "hi", "max_tokens": n, "ignore_eos": True, "seed": 1} for n in (9, 4)
    )
    with fake.connect() as connection:
        connection.sendall(
            raw_request("/v1/completions", json.dumps(first).encode())
            + raw_request("/v1/completions", json.dumps(second).encode(), Connection="close")
        )
        data = read_all(connection)
    assert [part.split(b",")[0] for part in data.split(b'"completion_tokens":')[1:]] == [b"9", b"4"]


def test_what_is_no_http_is_refused(fake: LiveServer) -> None:
    source = random.Random(1)
    for _ in range(50):
        with fake.connect() as connection:
            connection.sendall(source.randbytes(source.randrange(1, 500)) + b"\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            try:
                assert read_all(connection)[:12] in (b"", b"HTTP/1.1 400")
            except ConnectionResetError:
                pass
    still_serves(fake)


def test_bodies_that_were_damaged_are_answered(fake: LiveServer) -> None:
    """Send valid requests with some bytes changed: each gets an answer, and none a 5xx."""
    source = random.Random(2)
    good = [
        json.dumps({**BODY, "max_tokens": 3, "stop": ["x", "y"], "stream_options": None}).encode(),
        json.dumps({**CHAT, "max_tokens": 3, "tools": [], "n": 2}).encode(),
    ]
    for i in range(300):
        damaged = bytearray(good[i % 2])
        for _ in range(source.randrange(1, 6)):
            at = source.randrange(len(damaged))
            damaged[at : at + source.randrange(3)] = source.randbytes(source.randrange(3))
        path = ("/v1/completions", "/v1/chat/completions")[i % 2]
        answer = fake.post(path, bytes(damaged))
        assert answer.status_code in (200, 400, 404), (answer.text, bytes(damaged))
    still_serves(fake)


def test_a_storm_of_clients_that_leave_holds_nothing(fake: LiveServer) -> None:
    source = random.Random(3)
    connections = []
    for i in range(60):
        connection = fake.connect()
        body = {**BODY, "stream": bool(i % 2), "prompt": [i + 1] * source.randrange(1, 300)}
        data = raw_request("/v1/completions", json.dumps(body).encode())
        connection.sendall(
            data[: source.choice([len(data), len(data), source.randrange(len(data))])]
        )
        connections.append(connection)
    source.shuffle(connections)
    for connection in connections:
        source.choice([reset, socket.socket.close])(connection)
    still_serves(fake)
    waiting = fake.metrics()["sidestep:num_requests_waiting"]
    assert waiting == 0
