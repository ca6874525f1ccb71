"""The position in the queue, in streams that ask for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from sidestep.frontend.cli.remote_model import RemoteModel, RemoteQueuePosition
from tests.server.live import LiveServer, raw_request

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "ignore_eos": True,
}
STREAM = {**CHAT, "stream": True}


def occupy(server: LiveServer, stack: ExitStack, running: int, waiting: int) -> list[Any]:
    """Send long requests, and requests that wait for them. Return their connections.

    Closing a connection ends its request.
    """
    long = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body = json.dumps(long).encode()
    made = []
    for count in range(1, running + waiting + 1):  # one by one: they wait in this order
        made.append(stack.enter_context(server.connect()))
        made[-1].sendall(raw_request("/v1/completions", body))
        server.until(lambda load, count=count: load["num_running"] + load["num_waiting"] == count)
    server.until(lambda load: load["num_running"] == running)
    return made


def test_a_stream_is_told_how_many_are_before_it(make_server: Callable[..., LiveServer]) -> None:
    server = make_server("--max-num-seqs", "1", step_ms=5)
    told: list[RemoteQueuePosition] = []
    model = RemoteModel(server.url, None, None, {"max_tokens": 8, "ignore_eos": True})
    with ExitStack() as stack:
        before = occupy(server, stack, running=1, waiting=2)

        def note(place: RemoteQueuePosition) -> None:
            told.append(place)
            for connection in before:  # then no request is before it any more
                connection.close()

        model.on_queue = note

        async def ask() -> str:
            try:
                return "".join([piece async for piece in model.chat(CHAT["messages"])])
            finally:
                await model.close()

        assert asyncio.run(ask())
    assert told == [RemoteQueuePosition(2)] and told[0].text == "waiting, 2 before you"


def test_the_number_is_bounded(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(
        "--max-num-seqs", "1", step_ms=20
    )  # the first one must run until the last one waits
    with ExitStack() as stack:
        occupy(server, stack, running=1, waiting=64)
        with server.http.stream(
            "POST", "/v1/chat/completions", json=STREAM, headers={"x-queue-events": "1"}
        ) as answer:
            lines = (
                line for line in answer.iter_lines() if line and not line.startswith(":")
            )  # without comments
            assert [next(lines), next(lines)] == [
                "event: queue",
                'data: {"before":64,"or_more":true}',
            ]


def test_who_does_not_ask_or_does_not_wait_is_told_nothing(fake: LiveServer) -> None:
    plain = fake.post("/v1/chat/completions", STREAM)
    asked = fake.post("/v1/chat/completions", STREAM, **{"x-queue-events": "1"})
    for answer in (plain, asked):
        assert answer.status_code == 200 and answer.text.endswith("[DONE]\n\n")
        assert "event:" not in answer.text


def test_what_the_header_cannot_mean_is_refused_by_name(fake: LiveServer) -> None:
    for body, value, problem in (
        (STREAM, "yes", "must be 1, not 'yes'"),
        (CHAT, "1", "has a meaning only for streams"),
    ):
        answer = fake.post("/v1/chat/completions", body, **{"x-queue-events": value})
        assert (
            answer.status_code == 400
            and answer.json()["error"]["message"] == f"x-queue-events: {problem}"
        )


def test_an_error_before_the_first_event_keeps_its_status(fake: LiveServer) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "x" * 3000}], "stream": True}
    answer = fake.post("/v1/chat/completions", body, **{"x-queue-events": "1"})
    assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]
