"""`sidestep bench serve --url`: a load on a server, ours or one that fails."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.main import main
from tests.server.live import ROOT, LiveServer

Make = Callable[..., LiveServer]
Script = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]
LOAD = ["--num-prompts", "6", "--input-len", "5", "--output-len", "4", "--load-seed", "3"]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs the command and returns its report."""

    def run(*words: str) -> dict[str, Any]:
        assert main(["bench", "serve", *words, "--json"]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return run


def tokens_of(report: dict[str, Any]) -> int:
    count: float = report["output_tokens_per_s"] * report["seconds"]
    return round(count)


def test_a_load_on_our_server_is_served_whole(
    make_server: Make, bench: Callable[..., dict[str, Any]]
) -> None:
    server = make_server()
    report = bench("--url", server.url, "--vocab-size", "250", *LOAD, "--goodput", "e2e:60000")
    assert (report["requests"], report["failed"], report["goodput_share"]) == (6, 0, 1.0)
    assert (report["url"], report["model"]) == (server.url, "fake")
    assert tokens_of(report) == 24
    assert round(report["total_tokens_per_s"] * report["seconds"]) == 24 + 30
    assert 0 < report["ttft_ms_p50"] <= report["e2e_ms_p50"]
    # All 4 tokens may come at once; tpot spreads the rest of the time over 3 gaps.
    assert report["ttft_ms_mean"] + 3 * report["tpot_ms_mean"] == pytest.approx(
        report["e2e_ms_mean"]
    )
    server.until_idle()
    warm_up = server.metrics()["sidestep:generation_tokens_total"] - 24
    assert warm_up == 16  # the command sent no other requests


def test_our_server_tells_what_its_device_did(
    fake: LiveServer, bench: Callable[..., dict[str, Any]]
) -> None:
    report = bench("--url", fake.url, "--vocab-size", "250", *LOAD)
    assert report["device_busy_s"] > 0 and 0 <= report["device_idle_share"] <= 1
    causes = sum(
        report[f"device_idle_share_{cause}"] for cause in ("result", "schedule", "prepare")
    )
    assert causes == pytest.approx(report["device_idle_share"])
    assert report["cpu_s_frontend"] > 0 and report["cpu_s_client"] > 0


def test_an_engine_in_this_process_has_the_same_figures(
    fake: LiveServer, fake_model: str, bench: Callable[..., dict[str, Any]]
) -> None:
    there = bench("--url", fake.url, "--vocab-size", "250", *LOAD)
    here = bench(fake_model, "--device", "fake", *LOAD)
    assert here["failed"] == 0 and tokens_of(here) == 24
    # Requests whose tokens all came at once have no gaps to report.
    here_only, there_only = (
        {name for name in a.keys() - b.keys() if not name.startswith("itl")}
        for a, b in ((here, there), (there, here))
    )
    assert there_only == {"url", "model", "cpu_s_client"}
    assert here_only == {"device", "cpu_s_core", "cpu_s_worker_0"}


DRAFTS = ["-sc", '{"method": "synthetic", "synthetic_acceptance_rate": 1, "adaptive": false}']


def test_the_acceptance_length_is_told_by_a_server_and_by_an_engine_here(
    make_server: Make, fake_model: str, bench: Callable[..., dict[str, Any]]
) -> None:
    """All drafts are right, so each step behind a prompt's gives 5 tokens.

    Requests run one at a time, since a step with a prompt has no drafts.
    """
    load = ["--num-prompts", "3", "--max-concurrency", "1", "--input-len", "5"]
    load += ["--output-len", "11"]
    server = make_server(*DRAFTS)
    there = bench("--url", server.url, "--vocab-size", "250", *load)
    here = bench(fake_model, "--device", "fake", *DRAFTS, *load)
    for report in (there, here):
        assert report["acceptance_length"] == 5
        assert report["draft_tokens"] == report["accepted_draft_tokens"] == 3 * 8


def test_without_speculation_a_report_tells_nothing_of_drafts(
    fake: LiveServer, bench: Callable[..., dict[str, Any]]
) -> None:
    report = bench("--url", fake.url, "--vocab-size", "250", *LOAD)
    assert not any("draft" in name or "acceptance" in name for name in report)


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_throughput_and_latency_tell_the_acceptance_length(
    fake_model: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--input-len", "5", "--output-len", "11"]
    count = ["--num-prompts", "1"] if kind == "throughput" else ["--batch-size", "1"]
    words = [fake_model, "--device", "fake", *DRAFTS, *sizes, *count, "--json"]
    assert main(["bench", kind, *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance_length"] == 5
    assert report["draft_tokens"] == report["accepted_draft_tokens"] > 0


def test_texts_and_token_ids_of_a_file_are_sent(
    fake: LiveServer, tmp_path: Path, bench: Callable[..., dict[str, Any]]
) -> None:
    file = tmp_path / "requests"
    file.write_text('{"prompt": "seven b", "output_len": 3}\n{"prompt": [9, 8], "output_len": 1}\n')
    report = bench(
        "--url", fake.url + "/v1", "--dataset", str(file)
    )  # the same server: the routes begin with it
    assert report["failed"] == 0 and tokens_of(report) == 4
    assert round(report["total_tokens_per_s"] * report["seconds"]) == 4 + 9


def test_keys_and_names_are_sent(make_server: Make, bench: Callable[..., dict[str, Any]]) -> None:
    server = make_server(
        "--served-model-name", "other", environment={"SIDESTEP_API_KEYS": "sesame"}, key="sesame"
    )
    words = ["--url", server.url, "--vocab-size", "250", *LOAD]
    assert bench(*words, "--api-key", "sesame", "--served-model", "other")["failed"] == 0
    report = bench(*words)
    assert report["failed"] == 6 and report["failures"].startswith("6 x 401: ")
    report = bench(*words, "--api-key", "sesame", "--served-model", "nobody")
    assert report["failed"] == 6 and "nobody" in report["failures"]


def test_a_load_that_the_model_cannot_take_is_refused_before(
    fake: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["bench", "serve", "--url", fake.url, "--input-len", "2000", "--output-len", "49"])
        == 1
    )
    assert "together are more than max_model_len (2048)" in capsys.readouterr().err


def test_a_request_that_the_server_refuses_is_one_that_failed(
    fake: LiveServer, tmp_path: Path, bench: Callable[..., dict[str, Any]]
) -> None:
    file = tmp_path / "requests"
    file.write_text('{"prompt": "a", "output_len": 3}\n{"prompt": [9999], "output_len": 1}\n')
    report = bench("--url", fake.url, "--dataset", str(file))
    assert (
        report["failed"] == 1
        and report["failures"].startswith("1 x 400: ")
        and tokens_of(report) == 3
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_by_a_certificate_that_is_trusted(
    make_server: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bench: Callable[..., dict[str, Any]],
) -> None:
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
    server = make_server(
        "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), verify=False
    )
    words = ["--url", server.url, "--vocab-size", "250", *LOAD]
    report = bench(*words)
    assert report["failed"] == 6 and "certificate" in report["failures"]
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert bench(*words)["failed"] == 0


# Other servers.


class OtherServer(ThreadingHTTPServer):
    """A server that answers completions as a test has it, each second one correctly.

    It knows no models and no metrics.
    """

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: OtherServer

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            well = len(self.server.bodies) % 2 == 0
        (answer_well if well else self.server.script)(self, body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def other() -> Iterator[Callable[[Script], OtherServer]]:
    made: list[OtherServer] = []

    def make(script: Script) -> OtherServer:
        made.append(OtherServer(script))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return made[-1]

    yield make
    for server in made:
        server.shutdown()
        server.server_close()


def begin(handler: BaseHTTPRequestHandler, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def say(handler: BaseHTTPRequestHandler, *events: dict[str, Any] | str, end: str = "\n\n") -> None:
    for event in events:
        handler.wfile.write(
            f"data: {event if isinstance(event, str) else json.dumps(event)}{end}".encode()
        )


def text(words: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": words, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens},
    }


def answer_well(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Answer as some servers do.

    There are comments between events, lines end in CR LF, and the end of the connection ends the
    answer.
    """
    begin(handler)
    handler.wfile.write(b": ping\r\n\r\n")
    say(
        handler, text("a"), text("b", "length"), usage(body["max_tokens"]), "[DONE]", end="\r\n\r\n"
    )


def refuse(status: int) -> Script:
    def script(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        message = json.dumps({"error": {"message": "not now"}}).encode()
        begin(handler, status, content_length=str(len(message)))
        handler.wfile.write(message)

    return script


def stop_between_events(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    begin(handler)
    say(handler, text("a"))


def stop_between_chunks(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.protocol_version = "HTTP/1.1"
    begin(handler, transfer_encoding="chunked", connection="close")
    handler.wfile.write(b"10\r\ndata: ")


def stop_before_the_answer(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.close_connection = True


def say_error(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    begin(handler)
    say(handler, text("a"), {"error": {"message": "out of memory"}}, "[DONE]")


def say_no_usage(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    begin(handler)
    say(handler, text("a", "length"), "[DONE]")


def say_no_token(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    begin(handler)
    say(handler, text("", "stop"), usage(0), "[DONE]")


def say_nonsense(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    begin(handler)
    say(handler, "{")


def say_no_http(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.wfile.write(b"hello\r\n\r\n")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        (refuse(500), '500: {"error": {"message": "not now"}}'),
        (refuse(429), "429: .*not now"),
        (stop_between_events, "the answer broke off: the stream ended without"),
        (stop_between_chunks, "the answer broke off: the connection was closed"),
        (stop_before_the_answer, "the answer broke off: the connection was closed"),
        (say_error, "the server ended the stream: .*out of memory"),
        (say_no_usage, "the server sent no usage"),
        (say_no_token, "the server sent no token"),
        (say_nonsense, "an event is not one of a completion"),
        (say_no_http, "the answer broke off: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_requests_that_fail_do_not_end_the_others(
    script: Script,
    failure: str,
    other: Callable[[Script], OtherServer],
    bench: Callable[..., dict[str, Any]],
) -> None:
    report = bench("--url", other(script).url, *LOAD)
    assert (report["requests"], report["failed"], tokens_of(report)) == (6, 3, 12)
    assert re.match(f"3 x {failure}", report["failures"])
    assert "device_busy_s" not in report and report["cpu_s_client"] > 0


def test_nobody_at_the_url_is_a_report_of_failures(bench: Callable[..., dict[str, Any]]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # the port is bound, but nothing listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        report = bench("--url", url, *LOAD)
    assert (report["requests"], report["failed"]) == (6, 6)
    assert report["failures"].startswith(f"6 x no connection to {url}: ")


@pytest.mark.parametrize(("words", "sent"), [([], True), (["--no-ignore-eos"], False)])
def test_what_is_sent(
    words: list[str],
    sent: bool,
    other: Callable[[Script], OtherServer],
    bench: Callable[..., dict[str, Any]],
) -> None:
    server = other(answer_well)
    report = bench(
        "--url", server.url + "/", *LOAD, "--temperature", "0.5", "--served-model", "m", *words
    )
    assert report["failed"] == 0 and report["model"] == "m"
    for body in server.bodies[2:]:
        prompt = body.pop("prompt")
        assert len(prompt) == 5 and all(0 <= token < 1000 for token in prompt)
        assert body == {
            "model": "m",
            "max_tokens": 4,
            "temperature": 0.5,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if sent else {}),
        }


# Flags.


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--url", "http://x", "some/model"], "model: is for an engine in this process"),
        (["--url", "http://x", "--dtype", "float32"], "dtype: is for an engine in this process"),
        (
            ["--url", "http://x", "--no-async-scheduling"],
            "async_scheduling: is for an engine in this process",
        ),
        (["--api-key", "k"], "api_key: is for a server"),
        (["--served-model", "m"], "served_model: is for a server"),
        (["--vocab-size", "9"], "vocab_size: is for a server"),
        (["--url", "http://x", "--vocab-size", "0"], "vocab_size: must be at least 1"),
        (
            ["--url", "http://x", "--vocab-size", "9", "--dataset", "f"],
            "vocab_size: is for random prompts",
        ),
        (["--input-len", "9", "--dataset", "f"], "input_len: is for random prompts"),
        (["--output-len", "9", "--dataset", "f"], "output_len: is for random prompts"),
        (["--url", "http://x", "--api-key", "a\nb"], "api_key: must be"),
        *(
            (["--url", url], "url: ")
            for url in (
                "x:8000",
                "ftp://x",
                "http://",
                "http://x:y",
                "http://a@x",
                "http://x?a",
                "http://x /y",
            )
        ),
    ],
    ids=str,
)
def test_flags_that_make_no_sense_together_are_refused(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *words]) == 1
    assert capsys.readouterr().err.startswith(f"sidestep: {problem}")


def test_without_its_libraries_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['httptools'] = None\n"
        "from sidestep.frontend.main import main\n"
        "sys.exit(main(['bench', 'serve', '--url', 'http://x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "sidestep: httptools is missing; install it: pip install 'sidestep[server]'"
    ]
