"""Bodies of megabytes.

The server names the field when it refuses them, and keeps none of their memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.live import LiveServer

MEGABYTES = 3 << 20
TEXT = "def get_name(self, value):\n    return value\n" * (MEGABYTES // 44)
BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "completion": ("/v1/completions", {"prompt": TEXT}, "prompt"),
    "list": ("/v1/completions", {"prompt": ["a", TEXT]}, "prompt[1]"),
    "ids": ("/v1/completions", {"prompt": [1] * 500_000}, "prompt"),
    "lists of ids": ("/v1/completions", {"prompt": [[1] * 500_000]}, "prompt"),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
    "many messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "abc"}] * 50_000},
        "messages",
    ),
    "responses": ("/v1/responses", {"input": TEXT}, "input"),
    "tokenize": ("/tokenize", {"prompt": TEXT}, "prompt"),
    "tokenize chat": ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}, "messages"),
}


@pytest.mark.parametrize("name", BODIES)
def test_what_cannot_fit_is_refused_by_its_field(name: str, fake: LiveServer) -> None:
    path, body, field = BODIES[name]
    answer = fake.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        field,
    ), error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":[' + b"1," * 1_000_000 + b"1]}"),
        ("/v1/completions", b'{"prompt":[' + b"[1]," * 500_000 + b"[1]]}"),
        ("/detokenize", b'{"tokens":[' + b"1," * 1_000_000 + b"1]}"),
        (
            "/v1/chat/completions",
            b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":['
            + b"[]," * 500_000
            + b"[]]}}",
        ),
    ],
)
def test_a_body_of_too_many_values_is_refused(path: str, body: bytes, fake: LiveServer) -> None:
    answer = fake.post(path, body)
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


def test_many_tokens_become_text(fake: LiveServer) -> None:
    ids = fake.post("/tokenize", {"prompt": "abc"}).json()["tokens"]
    answer = fake.post("/detokenize", {"tokens": ids * 50_000})
    assert answer.status_code == 200 and answer.json()["prompt"] == "abc" * 50_000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_a_long_text_leaves_no_memory_behind(fake: LiveServer) -> None:
    process = psutil.Process(fake.process.pid)
    fake.post(
        "/v1/completions", {"prompt": TEXT}
    )  # the first request loads modules, which stay in memory
    before = process.memory_info().rss
    for name in ("completion", "chat", "tokenize") * 2:
        assert fake.post(*BODIES[name][:2]).status_code == 400
    fake.http.get("/health")
    assert process.memory_info().rss - before < 24 << 20
