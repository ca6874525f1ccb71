"""The bytes of a stream, one by one."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from sidestep.frontend.server.schemas.protocol import ChatChunk, Completion
from tests.server.live import LiveServer, raw_request, read_all, until
from tests.server.scripted import scripted_server

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
_EVENT = re.compile(rb"data: ([^\r\n]+)\n\n")


def stream(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return head and unchunked body of a streamed answer, read to the end of the connection."""
    with server.connect() as connection:
        connection.sendall(
            raw_request(path, json.dumps({**body, "stream": True}).encode(), Connection="close")
        )
        head, _, rest = read_all(connection).partition(b"\r\n\r\n")
    data = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            assert rest == b"\r\n"
            return head, data
        assert rest[length : length + 2] == b"\r\n"
        data, rest = data + rest[:length], rest[length + 2 :]


def events(data: bytes) -> list[bytes]:
    """Return the data of each event.

    There may be nothing between events, and the last one is [DONE].
    """
    found = _EVENT.findall(data)
    assert b"".join(b"data: %b\n\n" % each for each in found) == data
    assert found[-1] == b"[DONE]"
    return found[:-1]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [("/v1/chat/completions", CHAT, ChatChunk), ("/v1/completions", {"prompt": "hi"}, Completion)],
)
def test_a_stream_is_events_and_nothing_else(
    path: str, body: dict[str, Any], kind: Any, usage: bool, n: int, fake: LiveServer
) -> None:
    options = {"n": n, "max_tokens": 60, "ignore_eos": True, "seed": 2}
    more = {"stream_options": {"include_usage": True}} if usage else {}
    head, data = stream(fake, path, {**body, **options, **more})
    assert (
        head.startswith(b"HTTP/1.1 200 OK\r\n")
        and b"content-type: text/event-stream; charset=utf-8" in head
    )
    assert b"cache-control: no-cache" in head and b"content-length" not in head
    chunks = [msgspec.json.decode(event, type=kind) for event in events(data)]
    for event, chunk in zip(events(data), chunks, strict=True):
        # The structs of the OpenAPI document describe every sent field, and all their fields are
        # sent.
        assert json.loads(msgspec.json.encode(chunk)) == json.loads(event)
        assert ("usage" in json.loads(event)) == usage
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += (
                (choice.delta.content or "") if kind is ChatChunk else choice.text
            )
    whole = fake.post(path, {**body, **options}).json()
    assert texts == [
        c["message"]["content"] if kind is ChatChunk else c["text"] for c in whole["choices"]
    ]
    ends = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason == "length"]
    assert sorted(ends) == list(range(n))
    if usage:
        assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
        assert json.loads(msgspec.json.encode(chunks[-1].usage)) | {
            "prompt_tokens_details": None
        } == whole["usage"] | {"prompt_tokens_details": None}
        assert chunks[-1].usage.completion_tokens == 60 * n


def has_text(event: dict[str, Any], index: int) -> bool:
    """Return whether an event has text of a choice."""
    return any(
        choice["index"] == index and (choice.get("text") or choice.get("delta", {}).get("content"))
        for choice in event["choices"]
    )


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})]
)
def test_counts_so_far_are_those_of_the_event_s_choice(
    path: str, body: dict[str, Any], n: int, fake: LiveServer
) -> None:
    options = {
        "n": n,
        "max_tokens": 30,
        "ignore_eos": True,
        "seed": 2,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    *found, last = [
        json.loads(event) for event in events(stream(fake, path, {**body, **options})[1])
    ]
    for index in range(n):
        counts = [
            event["usage"]["completion_tokens"]
            for event in found
            if event["choices"][0]["index"] == index
        ]
        assert counts == sorted(counts) and counts[-1] == 30
        # Outputs merge while the server is busy elsewhere: then one event has all of the text.
        texts = [event for event in found if has_text(event, index)]
        assert len(set(counts)) > 1 or len(texts) == 1
    assert last["usage"]["completion_tokens"] == 30 * n and last["choices"] == []
    assert {event["usage"]["prompt_tokens"] for event in found} == {last["usage"]["prompt_tokens"]}


def test_text_that_looks_like_an_event_is_none(make_server: Any, tmp_path: Any) -> None:
    """Check that line ends and quotes are escaped.

    The prompt comes back within the data of its event.
    """
    server = make_server()
    prompt = 'data: [DONE]\n\ndata: {"x": "\u2028\x00\x7f\\"}\r\n\r\n\N{PILE OF POO}'
    _, data = stream(server, "/v1/completions", {"prompt": prompt, "echo": True, "max_tokens": 1})
    assert json.loads(events(data)[0])["choices"][0]["text"] == prompt


@pytest.mark.parametrize(
    ("route", "body", "text_of"),
    [
        ("completions", {"prompt": "hi"}, lambda event: event["choices"][0]["text"]),
        ("chat/completions", CHAT, lambda event: event["choices"][0]["delta"].get("content", "")),
        ("responses", {"input": "hi"}, lambda event: event.get("delta", "")),
    ],
)
async def test_a_reader_that_knows_the_line_ends_of_unicode_gets_all_of_the_text(
    route: str, body: dict[str, Any], text_of: Callable[[Any], str], fake_model: str
) -> None:
    """Read as clients with httpx do, whose lines end where those of Python's texts do."""
    async with scripted_server(fake_model) as (engine, client):
        engine.says = "one\u2028two\u2029three\x85four\N{PILE OF POO}"
        url = f"{client.base_url}{route}"
        asked = {"model": "scripted", "stream": True, **body}
        async with httpx2.AsyncClient() as http, http.stream("POST", url, json=asked) as answer:
            data = [
                line.removeprefix("data: ")
                async for line in answer.aiter_lines()
                if line.startswith("data: {")
            ]
    assert "".join(text_of(json.loads(each)) for each in data) == engine.says


def test_an_error_before_the_first_event_is_an_answer_of_its_own(fake: LiveServer) -> None:
    answer = fake.post("/v1/completions", {"prompt": [10**6], "stream": True})
    assert answer.status_code == 400 and answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["message"].startswith("prompt: ")


@pytest.mark.parametrize("n", [1, 8])
def test_a_slow_reader_gets_all_of_the_text(n: int, fake: LiveServer) -> None:
    body = {"prompt": "hi", "max_tokens": 1900, "ignore_eos": True, "seed": 1, "n": n}
    whole = fake.post("/v1/completions", body).json()["choices"]
    with fake.connect() as connection:
        connection.sendall(
            raw_request(
                "/v1/completions", json.dumps({**body, "stream": True}).encode(), Connection="close"
            )
        )
        fake.until(lambda load: load["num_running"] == 0)  # nothing has been read while it ran
        data = read_all(connection)
    texts = [""] * n
    for event in re.findall(rb"data: (\{.*\})\n\n", re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data)):
        choice = json.loads(event)["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole]


def test_what_a_client_is_too_slow_for_comes_in_fewer_events(make_server: Any) -> None:
    """Send more than the system buffers for a connection.

    From there on tokens merge, and the server keeps no events.
    """
    name = "m" * 8000  # every event has it
    server = make_server("--served-model-name", name)
    body = {"model": name, "prompt": "hi", "max_tokens": 1900, "ignore_eos": True, "seed": 1}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(
            raw_request(
                "/v1/completions", json.dumps({**body, "stream": True}).encode(), Connection="close"
            )
        )
        until(lambda: server.metrics()["sidestep:frontend_tokens_total"] >= 2 * 1900)
        data = read_all(connection)
    found = re.findall(rb"data: (\{.*\})\n\n", re.sub(rb"\r\n[0-9a-f]+\r\n", b"", data))
    texts = [json.loads(event)["choices"][0]["text"] for event in found]
    assert "".join(texts) == whole and len(texts) < 1500 and b"data: [DONE]" in data
