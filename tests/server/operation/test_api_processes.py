"""--api-server-count: several processes behind one socket, one server to its clients."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2
import psutil
import pytest

from tests.server.live import LiveServer, raw_request, read_all, read_until, until

Make = Callable[..., LiveServer]
LONG: dict[str, Any] = {"prompt": "hi", "max_tokens": 1000, "ignore_eos": True, "stream": True}
COUNT = 3


def api_processes(server: LiveServer) -> list[psutil.Process]:
    """Return the API processes, except for the first one, which owns the engine."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if _name(child).startswith("API process")]


def _name(process: psutil.Process) -> str:
    """Return the process's name, or an empty text when it has ended."""
    try:
        words: list[str] = process.cmdline()
        return (words or [""])[-1]
    except psutil.NoSuchProcess:
        return ""


class Stream:
    """A streamed completion over a connection of its own."""

    def __init__(self, server: LiveServer, body: dict[str, Any]) -> None:
        self._connection = server.connect()
        self._connection.sendall(
            raw_request("/v1/completions", json.dumps(body).encode(), Connection="close")
        )
        self.port: int = self._connection.getsockname()[1]
        self.data = read_until(self._connection, b"data: ")

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def rest(self) -> bytes:
        """Return the whole stream, to its end."""
        try:
            self.data += read_all(self._connection)
        except ConnectionResetError:
            pass
        return self.data


def holder(server: LiveServer, stream: Stream) -> int:
    """Return the process that answers a stream."""
    for process in (psutil.Process(server.process.pid), *api_processes(server)):
        if any(
            c.raddr and c.raddr.port == stream.port and c.laddr.port == server.port
            for c in process.net_connections("tcp")
        ):
            pid: int = process.pid
            return pid
    raise AssertionError("nobody has the connection")


def streams_of_all(server: LiveServer, stack: ExitStack) -> dict[int, Stream]:
    """Return a running stream at each process, by the process's id."""
    found: dict[int, Stream] = {}
    while len(found) < COUNT:
        stream = stack.enter_context(Stream(server, LONG))
        found.setdefault(holder(server, stream), stream)
    return found


def until_all_serve(server: LiveServer) -> None:
    """Return when there are as many processes as were asked for, and each tells its figures."""
    until(lambda: len(api_processes(server)) == COUNT - 1)
    until(lambda: server.metrics()["sidestep:api_processes"] == COUNT)


def complete(server: LiveServer, count: int) -> None:
    """Run `count` completions with 3 tokens each, side by side, over a connection each."""

    def one(_: int) -> int:
        with httpx2.Client() as client:
            return client.post(
                server.url + "/v1/completions",
                json={"prompt": "x", "max_tokens": 3, "ignore_eos": True},
            ).status_code

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(one, range(count))) == [200] * count


@pytest.fixture
def server(make_server: Make) -> Iterator[LiveServer]:
    with make_server("--api-server-count", str(COUNT), step_ms=5) as made:
        yield made


def test_all_processes_serve_and_are_counted_as_one(server: LiveServer) -> None:
    assert len(api_processes(server)) == COUNT - 1
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        assert set(streams) == {
            server.process.pid,
            *(process.pid for process in api_processes(server)),
        }
        assert server.metrics()["sidestep:api_processes"] == COUNT
    server.until_idle()
    ended = sum(
        value for name, value in server.metrics().items() if "request_success_total" in name
    )
    complete(server, 30)
    assert [
        server.metrics()['sidestep:request_success_total{finished_reason="length"}']
        for _ in range(6)
    ] == [30] * 6
    after = server.metrics()
    assert (
        sum(value for name, value in after.items() if "request_success_total" in name) == ended + 30
    )
    assert after['sidestep:tenant_requests_running{tenant="anonymous"}'] == 0


def test_one_s_death_ends_its_requests_alone_and_it_is_replaced(server: LiveServer) -> None:
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        before = server.metrics()
        victim = api_processes(server)[0]
        victim.kill()
        broken = streams.pop(victim.pid).rest()
        assert b"[DONE]" not in broken
        for stream in streams.values():
            assert b'"finish_reason":"length"' in stream.rest() and b"data: [DONE]" in stream.data
        until_all_serve(server)
        after = server.metrics()
        counters = [
            name for name in before if name.split("{")[0].endswith(("_total", "_count", "_bucket"))
        ]
        assert not [name for name in counters if after[name] < before[name]]
        assert victim.pid not in (process.pid for process in api_processes(server))
        streams_of_all(server, stack)  # the new one serves, too
    server.until_idle()
    assert server.close() == 0
    assert "was killed by SIGKILL; its requests have ended" in server.log


def test_a_drain_reaches_all(server: LiveServer) -> None:
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams.values():
            assert b'"finish_reason":"length"' in stream.rest() and b"data: [DONE]" in stream.data
    assert server.wait() == 0


def test_what_runs_too_long_at_any_of_them_is_ended_and_told(make_server: Make) -> None:
    server = make_server("--api-server-count", str(COUNT), "--shutdown-timeout", "0.1", step_ms=20)
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams.values():
            assert b'"finish_reason":"abort"' in stream.rest() and b"data: [DONE]" in stream.data
    assert server.wait() == 1 and "has ended before 1 of its requests" in server.log


def test_one_that_is_asked_to_end_drains_and_is_replaced(server: LiveServer) -> None:
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        victim = api_processes(server)[0]
        victim.terminate()
        assert b'"finish_reason":"length"' in streams[victim.pid].rest()
    until(lambda: not victim.is_running())
    until_all_serve(server)
    assert server.http.get("/ready").status_code == 200
    assert server.close() == 0 and "exited with status 0" in server.log


def test_one_that_hangs_holds_nobody_up(server: LiveServer) -> None:
    victim = api_processes(server)[0]
    victim.suspend()
    try:
        assert server.metrics()["sidestep:api_processes"] == COUNT - 1
        complete(server, 10)
    finally:
        victim.resume()
    until_all_serve(server)


def test_the_engine_s_death_ends_all_with_an_error(make_server: Make) -> None:
    server = make_server("--api-server-count", str(COUNT), "--restart-limit", "0", step_ms=5)
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        children = psutil.Process(server.process.pid).children()
        next(child for child in children if _name(child) == "engine core").kill()
        for stream in streams.values():
            assert b'"code":"engine_dead"' in stream.rest()
    assert server.wait() == 1
    assert "the engine has died" in server.log and "another takes its place" not in server.log


def test_nothing_is_left_of_a_server_that_was_killed(server: LiveServer) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(server.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, 30)
    assert not alive
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0


def test_the_queue_s_limits_are_shared(make_server: Make) -> None:
    server = make_server(
        "--api-server-count", "2", "--max-num-queued-reqs", "2", "--max-num-seqs", "1", step_ms=20
    )
    body = {**LONG, "prompt": ["x"] * 8}
    answer = server.post("/v1/completions", {**body, "stream": False})
    assert (
        answer.status_code == 429
        and "1 may (max_num_queued_reqs)" in answer.json()["error"]["message"]
    )


def test_keys_hold_at_all_of_them(make_server: Make) -> None:
    server = make_server(
        "--api-server-count", str(COUNT), environment={"SIDESTEP_API_KEYS": "one,two"}, key="one"
    )
    refused = 0
    while (told := server.metrics()).get(
        'sidestep:http_responses_total{path="other",status="401"}', 0
    ) < 12:
        with httpx2.Client(base_url=server.url) as client:
            assert (
                client.get("/v1/models", headers={"authorization": "Bearer three"}).status_code
                == 401
            )
            assert (
                client.get("/v1/models", headers={"authorization": "Bearer two"}).status_code == 200
            )
        refused += 1
    assert refused == 12 and told["sidestep:api_processes"] == COUNT


def test_one_that_cannot_be_replaced_ends_the_server(server: LiveServer) -> None:
    with ExitStack() as stack:
        streams = streams_of_all(server, stack)
        old = api_processes(server)
        old[0].kill()
        until(lambda: set(api_processes(server)) - set(old))
        (new,) = set(api_processes(server)) - set(old)
        new.kill()
        streams.pop(old[0].pid)
        for stream in streams.values():  # running requests may end
            assert b'"finish_reason":"length"' in stream.rest() and b"data: [DONE]" in stream.data
    assert server.wait() == 1
    assert "could not be replaced: API process" in server.log
