"""A server whose replicas run on other hosts, started by the commands of the documentation."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from tests.nodes import Nodes
from tests.server.live import LiveServer, raw_request, read_all, until


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_host_s_end_breaks_no_answer_and_operators_are_told(
    tmp_path: Path, fake_model: str, count: str
) -> None:
    invitation = tmp_path / "invitation"
    words = ("--placer", "join", "--data-parallel-size", "2", "--invitation-file", str(invitation))
    fake = ("--device", "fake", "--fake-step-ms", "3", "--api-server-count", count)
    with ExitStack() as stack:
        nodes = stack.enter_context(closing(Nodes(invitation)))
        victim = nodes.start(2)
        nodes.start(3)
        server = stack.enter_context(
            LiveServer(fake_model, *words, "--head-address", "127.0.0.1:0", *fake)
        )
        health = server.http.get("/health").json()
        assert sorted(health["hosts"]) == ["h2", "h3"]
        (lost,) = health["hosts"]["h2"]
        head = invitation.read_text()
        with socket.create_connection(address_in(head)) as stranger, suppress(ConnectionError):
            stranger.sendall(b"\x00" * 100_000)
        until(lambda: server.metrics()["sidestep:refused_peers_total"] == 1)
        body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
        streams = [stack.enter_context(server.connect()) for _ in range(16)]
        for i, stream in enumerate(streams):
            content = json.dumps({**body, "prompt": f"{i}" * 20}).encode()
            stream.sendall(raw_request("/v1/completions", content, Connection="close"))
        server.until(lambda load: load["num_running"] == 16)
        victim.kill()
        for answer in map(read_all, streams):
            assert b'"finish_reason":"length"' in answer and b"error" not in answer
        health = server.http.get("/health").json()
        assert health["status"] == "restarting" and sorted(health["hosts"]) == ["h3"]
        cause = health["restarting_replicas"][str(lost)]
        assert "host h2 has gone" in cause or "the engine core has ended" in cause
        assert server.metrics()['sidestep:replica_restarts_total{cause="host"}'] == 1
        nodes.start(2)
        until(lambda: server.http.get("/health").json()["status"] == "ok")
        assert server.http.get("/health").json()["hosts"]["h2"] == [lost]


def address_in(invitation: str) -> tuple[str, int]:
    """Return the head's address in an invitation."""
    host, _, port = json.loads(invitation)["head"].rpartition(":")
    return host, int(port)
