"""Processes of a server are killed amid 32 streams of a real model: no client misses a token."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.recovery.killed_server import killed, undisturbed, victims
from sidestep.frontend.bench.http_stream import HttpServer
from tests.server.live import LiveServer, until

STREAMS, TOKENS = 32, 150


@pytest.mark.parametrize(
    "names", [["worker 0", "engine core"], ["API process 1", "API process 2"]], ids=str
)
def test_each_stream_has_the_tokens_of_a_run_without_a_death(names: list[str]) -> None:
    """Clients of a killed API process ask again, with the ids of the tokens that they have."""
    options = ("--device", "cpu", "--cpu-threads", "1", "--api-server-count", "3")
    with LiveServer(*options) as live:
        server = HttpServer(live.url)
        expected = asyncio.run(undisturbed(server, STREAMS, TOKENS))
        assert [len(tokens) for tokens in expected] == [TOKENS] * STREAMS
        for name in names:
            victim = victims(live.process.pid)[name]
            streams = asyncio.run(killed(server, victim, STREAMS, TOKENS))
            assert [stream.tokens for stream in streams] == expected
            if not name.startswith("API process"):
                assert not any(stream.num_resumed for stream in streams)
            until(lambda: live.http.get("/health").json() == {"status": "ok"})
        assert live.close() == 0
