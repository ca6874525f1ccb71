"""Request ids and the access log.

A request's id goes from the client through the access log and back. Each line of a JSON log is one
object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.live import LiveServer

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3}


def test_an_id_is_returned_with_every_answer(fake: LiveServer) -> None:
    for path, status in (("/health", 200), ("/nowhere", 404)):
        answer = fake.http.get(path, headers={"x-request-id": "job-7:a/b=c@d"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "job-7:a/b=c@d")
    bodies: list[dict[str, Any]] = [BODY, BODY | {"stream": True}, {"prompt": []}]
    for body in bodies:
        assert (
            fake.post("/v1/completions", body, **{"X-Request-Id": "r-1"}).headers["x-request-id"]
            == "r-1"
        )


def test_a_request_without_one_gets_one(fake: LiveServer) -> None:
    made = {fake.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3 and all(len(one) == 32 for one in made)


@pytest.mark.parametrize("wrong", ["", "a b", 'a"b', "x" * 129, "é", "a,b"])
def test_an_id_that_could_spoil_a_log_is_refused(fake: LiveServer, wrong: str) -> None:
    answer = fake.http.get("/health", headers=[(b"x-request-id", wrong.encode("latin-1"))])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-request-id"
    assert len(answer.headers["x-request-id"]) == 32


def test_the_access_log_is_json_with_ids(make_server: Callable[..., LiveServer]) -> None:
    server = make_server("--access-log", "--log-format", "json", "--log-level", "info")
    server.post(
        "/v1/completions",
        BODY | {"user": "me", "metadata": {"job": "7"}},
        **{"X-Request-Id": "first"},
    ).raise_for_status()
    server.post(
        "/v1/completions", BODY | {"stream": True}, **{"X-Request-Id": "second"}
    ).raise_for_status()
    server.http.get("/no\u00e9where%22%0a", headers={"X-Request-Id": "third"})
    assert server.close() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    assert all(
        {"time", "level", "process", "pid", "logger", "message"} <= line.keys() for line in lines
    )
    access = {line["request_id"]: line for line in lines if line["logger"] == "sidestep.access"}
    # A line is written after its answer was sent, so the next request's line may come first.
    assert {name: (one["method"], one["path"], one["status"]) for name, one in access.items()} == {
        "first": ("POST", "/v1/completions", 200),
        "second": ("POST", "/v1/completions", 200),
        "third": ("GET", '/no\u00e9where"\n', 404),
    }
    assert access["first"]["client"] == "127.0.0.1" and access["first"]["duration_ms"] > 0
    assert access["first"]["response_id"].startswith("cmpl-")
    # The client's notes about its request.
    assert (access["first"]["user"], access["first"]["metadata.job"]) == ("me", "7")


def test_nothing_is_logged_of_requests_unless_it_is_asked_for(
    make_server: Callable[..., LiveServer],
) -> None:
    server = make_server()
    server.http.get("/health")
    server.close()
    assert "/health" not in server.log
