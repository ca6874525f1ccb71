"""The rights of users and operators, and of pages with a host name of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sidestep.frontend.main import main
from sidestep.frontend.options.serve_options import Keys, ServerArgs, read_keys
from sidestep.frontend.server.transport.hosts import is_known, known_hosts
from sidestep.ipc.common.errors import ValidationError
from tests.server.live import LiveServer, raw_request, read_until

Make = Callable[..., LiveServer]
LONG = json.dumps({"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
ENVIRONMENT = {"SIDESTEP_API_KEYS": "ann, bob", "SIDESTEP_OPERATOR_KEYS": "boss"}


@pytest.fixture(scope="module")
def keyed(fake_model: str) -> Iterator[LiveServer]:
    with LiveServer(
        fake_model,
        "--served-model-name",
        "fake",
        "--device",
        "fake",
        "--fake-step-ms",
        "5",
        environment=ENVIRONMENT,
        key="boss",
    ) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def tenant(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def test_figures_of_users_are_shown_to_operators_alone(keyed: LiveServer) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    for key in ("ann", "bob", "boss"):
        assert keyed.post("/v1/completions", body, **bearer(key)).status_code == 200

    def seen(key: str) -> set[str]:
        text = keyed.http.get("/metrics", headers=bearer(key)).raise_for_status().text
        return {name for name in map(tenant, ("ann", "bob", "boss")) if name in text}

    assert seen("boss") == set(map(tenant, ("ann", "bob", "boss")))
    assert seen("ann") == {tenant("ann")} and seen("bob") == {tenant("bob")}
    assert "anonymous" not in keyed.http.get("/metrics", headers=bearer("ann")).text


def test_names_of_requests_are_shown_to_those_who_sent_them_and_to_operators(
    keyed: LiveServer,
) -> None:
    def names(key: str) -> list[str]:
        answer = keyed.http.get("/v1/flight", headers=bearer(key)).raise_for_status().json()
        return [request["request_id"] for request in answer["requests"]]

    with keyed.connect() as stream:
        stream.sendall(raw_request("/v1/completions", LONG, Authorization="Bearer ann"))
        read_until(stream, b"data: ")
        (name,) = names("boss")
        assert name.startswith("cmpl-")
        assert names("ann") == [name] and names("bob") == [""]
    keyed.until_idle()


def test_without_keys_everyone_sees_everything(fake: LiveServer) -> None:
    assert fake.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200
    assert 'tenant="anonymous"' in fake.http.get("/metrics").text


@pytest.mark.parametrize("variable", ["SIDESTEP_API_KEYS", "SIDESTEP_OPERATOR_KEYS"])
@pytest.mark.parametrize("value", ["", ",", " , "])
def test_a_variable_that_was_meant_to_guard_and_holds_no_key_is_refused(
    variable: str,
    value: str,
    fake_model: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["serve", fake_model, "--device", "fake", "--port", "0"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"sidestep: {variable}: is set and holds no key; unset it to go without"


def test_a_key_is_a_users_or_an_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDESTEP_API_KEYS", "ann bob")
    monkeypatch.setenv("SIDESTEP_OPERATOR_KEYS", "boss")
    assert read_keys(ServerArgs()) == Keys(("ann", "bob", "boss"), ("boss",))
    monkeypatch.setenv("SIDESTEP_OPERATOR_KEYS", "boss, bob")
    with pytest.raises(
        ValidationError, match="1 of the operators' keys are users' keys too"
    ) as caught:
        read_keys(ServerArgs())
    assert "bob" not in str(caught.value)


# Listening beyond this machine.


def test_a_server_that_anyone_can_reach_says_so(make_server: Make) -> None:
    server = make_server("--host", "0.0.0.0")
    assert server.log.count("WARNING: this server listens beyond this machine and has no keys") == 1
    # This server accepts any Host: clients may reach it by any name.
    assert server.http.get("/version", headers={"host": "llm.example"}).status_code == 200
    guarded = make_server("--host", "0.0.0.0", environment=ENVIRONMENT, key="ann")
    assert "WARNING" not in guarded.log


# Names.


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "10.1.2.3",
        "[fe80::1]",
        "127.0.0.1.evil.example",
        "[::",
        "a b",
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(host: str, fake: LiveServer) -> None:
    for answer in (
        fake.http.get("/v1/models", headers={"host": host}),
        fake.http.get("/", headers={"host": host}),
        fake.post("/v1/completions", {"prompt": "hi"}, host=host),
    ):
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:9", "[::1]", "[::1]:80"]
)
def test_this_machine_is_known_by_its_names(host: str, fake: LiveServer) -> None:
    assert fake.http.get("/v1/models", headers={"host": host}).status_code == 200


def test_with_keys_any_name_is_right(keyed: LiveServer) -> None:
    assert keyed.http.get("/v1/models", headers={"host": "llm.example"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "host", "right"),
    [
        ({"allowed_hosts": ["llm.example"]}, "llm.example:443", True),
        ({"allowed_hosts": ["llm.example"]}, "x.example", False),
        ({"allowed_hosts": ["LLM.example:8000"]}, "llm.example", True),
        ({"allowed_hosts": ["*"]}, "x.example", True),
        ({"allowed_origins": ["https://llm.example"]}, "llm.example", True),
        ({"host": "0.0.0.0"}, "x.example", True),
        ({"host": "::1"}, "[::1]:8000", True),
        ({"host": "localhost"}, "x.example", False),
        ({}, "", True),
    ],
)
def test_names_may_be_allowed(options: dict[str, Any], host: str, right: bool) -> None:
    known = known_hosts(ServerArgs(**options), ())
    assert (known is None or is_known(host, known)) is right
