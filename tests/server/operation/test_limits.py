"""Keys, origins, sizes, queues and deadlines."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.server.live import LiveServer, raw_request, read_all, read_until

Make = Callable[..., LiveServer]
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
GUARDED = [
    "/v1/models",
    "/v1/load",
    "/v1/flight",
    "/version",
    "/metrics",
    "/openapi.json",
    "/nowhere",
]


def start(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    """Return a stream once its first event is there; closing it ends it."""
    connection = server.connect()
    connection.sendall(raw_request("/v1/completions", json.dumps(body).encode()))
    read_until(connection, b"data: ")
    return connection


# Keys.


@pytest.fixture(scope="module")
def keyed(fake_model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# of the team\nfirst-key\n\n  second-key\n")
    with LiveServer(
        fake_model,
        "--device",
        "fake",
        "--api-key-file",
        str(file),
        key="first-key",
        environment={"SIDESTEP_API_KEYS": "third-key, fourth-key"},
    ) as server:
        yield server


@pytest.mark.parametrize("key", ["first-key", "second-key", "third-key", "fourth-key"])
def test_every_key_opens(key: str, keyed: LiveServer) -> None:
    assert keyed.post("/v1/completions", TEXT, authorization=f"Bearer {key}").status_code == 200


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer wrong",
        "Bearer first-key2",
        "Basic first-key",
        "first-key",
        "Bearer first-key,second-key",
        "Bearer \xff",
    ],
)
def test_without_a_right_key_nothing_opens(authorization: str, keyed: LiveServer) -> None:
    value = authorization.encode("latin-1")
    header = {b"authorization": value} if authorization else {}
    with httpx2.Client(base_url=keyed.url) as http:
        for path in GUARDED:
            answer = http.get(path, headers=header)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.post("/v1/completions", json=TEXT, headers=header).status_code == 401
        assert (
            http.get("/health", headers=header).status_code
            == http.get("/ready", headers=header).status_code
            == 200
        )


def test_users_of_different_keys_share_no_cached_prefix(keyed: LiveServer) -> None:
    body = {
        "prompt": "a prompt of some length, said by two users " * 3,
        "max_tokens": 1,
        "cache_salt": "same",
    }

    def cached(key: str) -> int:
        usage = keyed.post("/v1/completions", body, authorization=f"Bearer {key}").json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("first-key"), cached("second-key")] == [0, 0]
    assert cached("first-key") > 0


def test_a_file_without_keys_is_refused(
    fake_model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from sidestep.frontend.main import main

    file = tmp_path / "keys"
    file.write_text("# none\n")
    assert main(["serve", fake_model, "--device", "fake", "--api-key-file", str(file)]) == 1
    assert "api_key_file" in capfd.readouterr().err


# Pages of other origins.


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:1", "http://[", "file://"]
)
def test_pages_of_other_origins_are_refused(origin: str, fake: LiveServer) -> None:
    answer = fake.post("/v1/completions", TEXT, origin=origin)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "origin_not_allowed"
    preflight = fake.http.options(
        "/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}
    )
    assert preflight.status_code == 403
    assert not any(
        name.startswith("access-control") for name in {**answer.headers, **preflight.headers}
    )


def test_a_name_that_was_made_to_point_here_is_another_origin(fake: LiveServer) -> None:
    host = f"evil.example:{fake.port}"
    assert fake.post("/v1/completions", TEXT, origin=f"http://{host}", host=host).status_code == 403
    for own in ("localhost", "127.0.0.1"):
        answer = fake.post(
            "/v1/completions", TEXT, origin=f"http://{own}:{fake.port}", host=f"{own}:{fake.port}"
        )
        assert answer.status_code == 200


def test_an_origin_that_is_allowed_is_served(make_server: Make) -> None:
    server = make_server("--allowed-origins", "https://chat.example")
    asked = server.http.options(
        "/v1/completions",
        headers={
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-stainless-lang",
        },
    )
    assert (
        asked.status_code == 204
        and "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    )
    answer = server.post("/v1/completions", TEXT, origin="https://chat.example")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert (
        server.post("/v1/completions", TEXT, origin="https://chat.example.evil").status_code == 403
    )


# Sizes.


def test_a_body_that_is_too_large_is_refused(make_server: Make) -> None:
    server = make_server("--max-body-bytes", "1k")
    large = json.dumps({"prompt": "x" * 2000}).encode()
    assert server.post("/v1/completions", large).status_code == 413
    pieces = (large[i : i + 100] for i in range(0, len(large), 100))  # without a content-length
    answer = server.http.post(
        "/v1/completions", content=pieces, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_headers_that_are_too_large_are_refused(fake: LiveServer) -> None:
    for head in (
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 50_000,
    ):
        with fake.connect() as connection:
            try:
                connection.sendall(head)
                connection.sendall(b"\r\n\r\n")
                data = read_all(connection)
            except (ConnectionResetError, BrokenPipeError):
                continue  # it has closed before all was sent
            assert data.startswith(b"HTTP/1.1 400 ")
    assert fake.http.get("/health").status_code == 200


def test_a_client_that_is_too_slow_is_left(make_server: Make) -> None:
    server = make_server("--read-timeout", "0.2")
    for begun in (b"", b"POST /v1/completions HT"):
        with server.connect() as connection:
            connection.sendall(begun)
            assert read_all(connection) == b""
    with server.connect() as connection:
        connection.sendall(raw_request("/v1/completions", b'{"prompt"', Content_Length="50"))
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
    assert server.post("/v1/completions", TEXT).status_code == 200


# Queues.


def test_a_full_queue_refuses_and_says_when_to_come_again(make_server: Make) -> None:
    server = make_server("--max-num-seqs", "1", "--max-num-queued-reqs", "2", step_ms=2)
    running = start(server, LONG)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(server.post, "/v1/completions", TEXT) for _ in range(2)]
        server.until(lambda load: load["num_waiting"] == 2)
        for body in (TEXT, {**TEXT, "stream": True}, {**TEXT, "n": 3}):
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        assert server.load()["num_waiting"] == 2
        running.close()
        assert [w.result().status_code for w in waiting] == [200, 200]
    server.until_idle()
    assert server.metrics()['sidestep:admission_rejections_total{reason="queue_full"}'] >= 3


def test_a_queue_of_prompts_is_bounded_by_their_tokens(make_server: Make) -> None:
    server = make_server("--max-num-seqs", "1", "--max-num-queued-tokens", "100", step_ms=2)
    running = start(server, LONG)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/v1/completions", {**TEXT, "prompt": "x" * 80})
        server.until(lambda load: load["num_waiting"] == 1)
        assert server.post("/v1/completions", {**TEXT, "prompt": "x" * 30}).status_code == 429
        running.close()
        assert waiting.result().status_code == 200


# Deadlines.


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request_and_says_so(stream: bool, make_server: Make) -> None:
    server = make_server(step_ms=5)
    body = {**LONG, "stream": stream}
    for given, headers in (
        ({"deadline_ms": 100}, {}),
        ({}, {"x-deadline-ms": "100"}),
        ({"deadline_ms": 10**6}, {"x-deadline-ms": "100"}),
    ):
        answer = server.post("/v1/completions", {**body, **given}, **headers)
        last = answer.json() if not stream else json.loads(answer.text.split("data: ")[-2])
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == (
            "abort",
            "deadline",
        )
    server.until_idle()


@pytest.mark.parametrize("header", ["soon", "-1", "0", "9" * 5000, "1.5"])
def test_a_deadline_that_is_none_is_refused(header: str, fake: LiveServer) -> None:
    answer = fake.post("/v1/completions", TEXT, **{"x-deadline-ms": header})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-deadline-ms"


# TLS.


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_with_a_certificate(fake_model: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            key,
            "-out",
            certificate,
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(cafile=str(certificate))
    with LiveServer(
        fake_model,
        "--device",
        "fake",
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
        verify=context,
    ) as server:
        assert server.url.startswith("https://")
        assert server.post("/v1/completions", TEXT).status_code == 200


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--port", "70000"], "port: "),
        (["--ssl-keyfile", "k"], "ssl_certfile: "),
        (["--host", "x.invalid"], "host: "),
        (["--ssl-certfile", "/nowhere"], "ssl_certfile: "),
        (["--allowed-origins", "evil"], "allowed_origins: "),
        (["--read-timeout", "0"], "read_timeout: "),
        (["--max-num-queued-reqs", "0"], "max_num_queued_reqs: "),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_one_line(
    words: list[str], line: str, fake_model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from sidestep.frontend.main import main

    assert main(["serve", fake_model, "--device", "fake", "--port", "0", *words]) == 1
    shown = capfd.readouterr().err.splitlines()[-1]
    assert shown.startswith("sidestep: ") and line in shown
