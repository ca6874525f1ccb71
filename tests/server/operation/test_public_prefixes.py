"""--public-prefixes: the text that tenants share; they share nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestep.frontend.server.service.public_prefixes import read_public_prefixes
from sidestep.ipc.common.errors import ValidationError
from tests.server.live import LiveServer

Make = Callable[..., LiveServer]
BLOCK = 16
TEXT = "This is what every prompt of this company begins with, and no secret."
SYSTEM = {
    "role": "system",
    "content": "You are the helpful assistant of a company that everybody knows.",
}
KEYS = {"SIDESTEP_API_KEYS": "red,blue,green"}


@pytest.fixture(params=["1", "2"])
def server(
    request: pytest.FixtureRequest, make_server: Make, tmp_path: Path
) -> Iterator[LiveServer]:
    """Yield a server with one API process, and one with two.

    A token is a byte, so texts have as many tokens as bytes.
    """
    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps({"text": TEXT}) + "\n\n" + json.dumps({"messages": [SYSTEM]}) + "\n")
    with make_server(
        "--public-prefixes",
        str(file),
        "--api-server-count",
        request.param,
        environment=KEYS,
        key="red",
    ) as made:
        yield made


def cached(server: LiveServer, key: str, path: str, body: dict[str, Any]) -> int:
    answer = server.post(path, {"max_tokens": 1, **body}, authorization=f"Bearer {key}")
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def complete(server: LiveServer, key: str, prompt: str, **body: Any) -> int:
    return cached(server, key, "/v1/completions", {"prompt": prompt, **body})


def test_a_public_text_is_shared_and_nothing_beyond_it(server: LiveServer) -> None:
    public, secret = (
        len(TEXT) // BLOCK * BLOCK,
        " And this is a secret, which is of some length, too." * 2,
    )
    assert complete(server, "red", TEXT + secret) == 0
    assert (
        complete(server, "blue", TEXT + secret) == public
    )  # blue sees nothing of red's other text
    assert complete(server, "green", TEXT + " Something else." + secret) == public
    whole = (len(TEXT + secret) - 1) // BLOCK * BLOCK
    assert (
        complete(server, "red", TEXT + secret) == complete(server, "blue", TEXT + secret) == whole
    )
    # A tenant's own salt shares nothing with anyone who has another one, the public text included.
    assert complete(server, "green", TEXT + secret, cache_salt="mine") == 0


def test_a_text_that_is_not_listed_is_nobody_s_to_share(server: LiveServer) -> None:
    private = "x" + TEXT + TEXT  # the public text is in it, but not at its beginning
    assert [complete(server, key, private) for key in ("red", "blue")] == [0, 0]
    assert complete(server, "red", private) > 0


def test_a_public_system_message_is_shared_and_nothing_beyond_it(server: LiveServer) -> None:
    def chat(key: str, text: str) -> int:
        return cached(
            server,
            key,
            "/v1/chat/completions",
            {"messages": [SYSTEM, {"role": "user", "content": text}]},
        )

    public = len(f"<system>{SYSTEM['content']}<user>") // BLOCK * BLOCK
    secret = "a secret of mine, long enough to fill some blocks of the cache"
    assert [chat("red", secret), chat("blue", secret), chat("green", "hello")] == [
        0,
        public,
        public,
    ]
    assert chat("red", secret) > public


def test_a_text_may_hold_the_line_ends_of_unicode(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text('{"text": "one\u2028two\x85"}\r\n{"text": "b"}', "utf-8")
    assert [each.text for each in read_public_prefixes(str(file), ["one", "two"])] == [
        "one\u2028two\x85",
        "b",
    ]


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "public.jsonl"
    file.write_bytes(b'{"text": "a"}\n{"text": "\xff"}')
    with pytest.raises(ValidationError, match=r"public_prefixes: .*:2: .*utf-8"):
        read_public_prefixes(str(file), ["one", "two"])


@pytest.mark.parametrize(
    ("content", "keys", "problem"),
    [
        ('{"text": "a"}', ["one"], "several API keys"),
        ("", ["one", "two"], "holds none"),
        ("no json", ["one", "two"], ":1: "),
        ('{"text": "a"}\n{"txt": "a"}', ["one", "two"], ":2: .*txt"),
        ("{}", ["one", "two"], "either text or messages"),
        ('{"text": "a", "messages": [{}]}', ["one", "two"], "either text or messages"),
    ],
)
def test_a_file_that_is_wrong_is_refused(
    content: str, keys: list[str], problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text(content)
    with pytest.raises(ValidationError, match=f"(?s)public_prefixes: .*{problem}"):
        read_public_prefixes(str(file), keys)
