"""`sidestep chat` and `sidestep generate` with --url.

The server is this one, or one that answers as other servers do.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.cli.remote_model import base_url
from sidestep.ipc.common.errors import ValidationError
from tests import processes
from tests.server.live import ROOT, LiveServer


def run(
    *words: str, say: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command with these lines as its input."""
    return processes.run(
        *(sys.executable, "-m", "sidestep", *words),
        input=say,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )


def test_a_chat_with_a_server_is_that_with_an_engine(tiny: LiveServer) -> None:
    words = ["chat", "--temperature", "0", "--max-tokens", "40"]
    say = "Hello!\ndef get_name(\n/reset\nHello!\n"
    there, here = run(*words, "--url", tiny.url, say=say), run(*words, say=say)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout and "Ask me about a module" in there.stdout
    assert (
        there.stderr.startswith(f"tiny-python at {tiny.url}\n")
        and "starting the engine" not in there.stderr
    )


def test_prompts_are_completed_by_a_server_as_by_an_engine(tiny: LiveServer) -> None:
    """`complete` is another name of `generate`."""
    words = ["--temperature", "0", "--max-tokens", "12", "def get_name(", "class Stack:"]
    there, here = run("complete", *words, "--url", tiny.url + "/v1/"), run("generate", *words)
    assert there.returncode == 0, there.stderr
    assert there.stdout == here.stdout and here.stdout.startswith("def get_name(")
    assert re.search("^2 requests in ", there.stderr, re.MULTILINE)


def test_a_message_that_the_server_refuses_is_told_and_forgotten(fake: LiveServer) -> None:
    done = run("chat", "--url", fake.url, "--max-tokens", "1", say="x" * 3000 + "\nhi\n")
    assert done.returncode == 0
    assert "your messages resulted in 30" in done.stderr
    assert done.stderr.count("status 400") == 1  # the second is alone, and short enough


def test_a_chat_ends_if_the_servers_model_has_no_chat_template(
    fake_model: str, tmp_path: Path
) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(Path(fake_model) / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with LiveServer(str(tmp_path), "--device", "fake") as server:
        done = run("chat", "--url", server.url, say="hi\nhow are you?\n")
        assert (done.returncode, done.stdout) == (1, "> \n")
        assert done.stderr.endswith(
            "\nsidestep: the model has no chat template, so it cannot chat; "
            "`sidestep generate --url` completes text with it\n"
        )
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "messages: this model has no chat template; "
        "/v1/completions completes a prompt that is text",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "no_chat_template",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--max-num-seqs", "4"),
            "sidestep: max_num_seqs: is for an engine that is started here; --url asks",
        ),
        (("--no-async-scheduling",), "sidestep: async_scheduling: is for an engine"),
        (("--model", "other"), "status 404: model: 'other' is not served here"),
        (("--temperature", "9"), "status 400: temperature: Expected `float` <= 2.0"),
    ],
)
def test_what_makes_no_sense_to_a_server_is_refused_by_name(
    words: tuple[str, ...], message: str, fake: LiveServer
) -> None:
    done = run("generate", "--url", fake.url, *words, "hi")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr


def test_a_key_without_a_server_is_refused() -> None:
    done = run("chat", "--api-key", "one")
    assert (
        done.returncode == 1 and done.stderr == "sidestep: api_key: has a meaning only with --url\n"
    )


def test_the_key_is_a_flag_or_of_the_environment(make_server: Callable[..., LiveServer]) -> None:
    keys = {"SIDESTEP_API_KEYS": "one,two"}
    server = make_server(environment=keys)
    words = ("generate", "--url", server.url, "--max-tokens", "1", "hi")
    assert run(*words, "--api-key", "two").returncode == 0
    mine = {"SIDESTEP_API_KEY": "one"}
    assert run(*words, environment=mine).returncode == 0
    refused = "answered with status 401: a valid API key"
    assert refused in run(*words, "--api-key", "three", environment=mine).stderr
    # The keys that servers on this machine accept are never sent to a server elsewhere.
    assert refused in run(*words, environment=keys).stderr


def test_ctrl_c_ends_the_request_at_the_server(make_server: Callable[..., LiveServer]) -> None:
    server = make_server(step_ms=20)
    chat = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "sidestep",
            "chat",
            "--url",
            server.url,
            "--max-tokens",
            "1900",
            "--ignore-eos",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert chat.stdin is not None and chat.stdout is not None
    chat.stdin.write(b"hi\n")
    chat.stdin.flush()
    shown = b""
    while len(shown) < 5:  # the prompt, and some of the answer
        part = os.read(chat.stdout.fileno(), 100)
        assert part, shown
        shown += part
    chat.send_signal(signal.SIGINT)
    chat.stdin.close()
    assert chat.wait(60) == 0  # the answer was stopped, then the input had ended
    chat.stdout.close()
    server.until_idle()


# Other servers.


class Other:
    """A server that gives one answer to every POST."""

    def __init__(self) -> None:
        self.status, self.kind, self.body = 200, "text/event-stream", b""
        self.asked: list[Any] = []
        other = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(
                    200,
                    "application/json",
                    b'{"object": "list", "data": [{"id": "first"}, {"id": "b"}]}',
                )

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                other.asked.append((self.path, self.headers["authorization"], body))
                self.answer(other.status, other.kind, other.body)

            def answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def other() -> Iterator[Other]:
    other = Other()
    thread = threading.Thread(target=other.server.serve_forever)
    thread.start()
    yield other
    other.server.shutdown()
    thread.join()
    other.server.server_close()


def test_only_what_was_asked_for_is_sent(other: Other) -> None:
    other.body = (
        ': a comment\r\n\r\ndata: {"id": 1, "choices": [{"delta": {"role": "assistant"}}]}\r\n\r\n'
        'data: {"choices": [{"delta": {"content": "a\u2028b"}}], "usage": null}\r\n\r\n'
        'data: {"choices": [], "usage": {}}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
    )
    done = run(
        "chat",
        "--url",
        f"{other.url}/api/v3",
        "--top-p",
        "0.5",
        say="hi",
        environment={"SIDESTEP_API_KEYS": "secret"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "> a\u2028b\n> "
    assert other.asked == [
        (
            "/api/v3/chat/completions",
            None,
            {
                "model": "first",
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 256,
                "top_p": 0.5,
                "stream": True,
            },
        )
    ]


@pytest.mark.parametrize(
    ("status", "kind", "body", "message"),
    [
        (
            500,
            "text/html",
            b"<h1>\nOops</h1>",
            "/v1/completions answered with status 500: <h1> Oops</h1>",
        ),
        (200, "application/json", b"{}", "Expected response with content type 'text/event-stream'"),
        (200, "text/event-stream", b"data: 7\n\n", "does not speak the OpenAI API: "),
        (
            200,
            "text/event-stream",
            b'data: {"error": {"message": "it has died"}}\n\n',
            "sidestep: it has died",
        ),
    ],
)
def test_failures_are_one_line(
    status: int, kind: str, body: bytes, message: str, other: Other
) -> None:
    other.status, other.kind, other.body = status, kind, body
    done = run("generate", "--url", other.url, "--model", "m", "hi")
    assert done.returncode == 1 and message in done.stderr
    assert done.stderr.splitlines()[0] == f"m at {other.url}" and len(done.stderr.splitlines()) == 2


def test_a_server_that_is_not_there_is_one_line() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.server_close()
    done = run("chat", "--url", f"http://127.0.0.1:{server.server_port}", say="hi\n")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"sidestep: http://127.0.0.1:{server.server_port}/v1: ")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host/v1?x=1", "http://[", ""]
)
def test_what_is_no_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValidationError, match="^url: must be like"):
        base_url(url)
