"""Measure how long honest clients wait while hostile clients load the same server.

    python benchmarks/server/hostile_load.py [--seconds 20] [--device fake] [--step-ms 5]

Start a server with two replicas and stop a worker of the second. Other processes then post 16 MB
bodies to four routes, send grammars that are ambiguous in every token with 128 choices, and hold
400 connections that send nothing. Meanwhile this process asks /health twenty times a second and
reads streams. It prints the longest delays with and without the hostile clients.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil

ROOT = Path(__file__).resolve().parents[2]
_MB = 1 << 20
_TEXT = "def add(a, b):\n    return a + b\n"
_GRAMMAR = {
    "prompt": [1, 5, 9],
    "max_tokens": 40,
    "best_of": 128,
    "structured_outputs": {"grammar": 'start: start start | "a"'},
}
_IDLE = 400


@dataclass
class Delays:
    """Seconds that honest clients waited, by kind of wait."""

    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, name: str) -> str:
        """Return the table's row."""

        def worst(values: list[float]) -> str:
            return f"{max(values, default=float('nan')) * 1e3:10.0f}"

        return (
            f"{name:24}{worst(self.health)}{worst(self.gaps)}{len(self.health):8}{len(self.gaps):9}"
            f"{len(self.failures):9}"
        )


def post_large(url: str, until: float) -> None:
    """Post 16 MB to one route after the other."""
    text = (_TEXT * (16 * _MB // len(_TEXT)))[: 16 * _MB - 200]
    bodies = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a" * len(text), "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        ),
        ("/tokenize", {"prompt": text}),
        ("/v1/responses", {"input": text, "max_output_tokens": 16}),
    ]
    encoded = [(path, json.dumps(body).encode()) for path, body in bodies]
    repeat(url, until, encoded)


def post_grammars(url: str, until: float) -> None:
    """Send hostile grammars."""
    repeat(url, until, [("/v1/completions", json.dumps(_GRAMMAR).encode())])


def repeat(url: str, until: float, bodies: list[tuple[str, bytes]]) -> None:
    """Send the bodies in turn until the time is over. The answers are ignored."""
    with httpx2.Client(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            for path, body in bodies:
                with suppress(httpx2.HTTPError):
                    http.post(path, content=body, headers={"content-type": "application/json"})


def hold_connections(url: str, until: float) -> None:
    """Hold connections that send nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        for _ in range(_IDLE):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        time.sleep(max(0.0, until - time.monotonic()))


def watch_health(url: str, until: float, delays: Delays) -> None:
    """Ask /health twenty times a second."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        while time.monotonic() < until:
            begin = time.monotonic()
            answer = http.get("/health")
            delays.health.append(time.monotonic() - begin)
            if answer.status_code != 200:
                delays.failures.append(answer.text)
            time.sleep(0.05)


def read_streams(url: str, until: float, delays: Delays, tokens: int) -> None:
    """Read streams, and record each gap between tokens and each time to the first token.

    One stream is read after the other.
    """
    body = {"prompt": "def get_name(", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx2.Client(base_url=url, timeout=60) as http:
        while time.monotonic() < until:
            last = time.monotonic()
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.monotonic()
                        delays.gaps.append(now - last)
                        last = now
            if answer.status_code != 200:
                delays.failures.append(str(answer.status_code))


def measure(url: str, seconds: float, tokens: int) -> Delays:
    """Run the honest clients for some seconds, and return their delays."""
    delays, until = Delays(), time.monotonic() + seconds
    work: list[tuple[Callable[..., None], tuple[object, ...]]] = [
        (watch_health, (url, until, delays))
    ]
    work += [(read_streams, (url, until, delays, tokens))] * 4
    threads = [threading.Thread(target=target, args=args) for target, args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return delays


def stop_a_worker(server: subprocess.Popen[str], url: str) -> psutil.Process:
    """Stop the second replica's worker, and wait until the server has noticed."""
    cores = [
        child
        for child in psutil.Process(server.pid).children()
        if child.cmdline()[-1] == "engine core"
    ]
    (worker,) = [child for child in cores[1].children() if child.cmdline()[-1].startswith("worker")]
    worker.suspend()
    with httpx2.Client(base_url=url, timeout=60) as http:
        for number in range(8):  # the first ones of the stuck replica end by their deadline
            http.post(
                "/v1/completions",
                json={"prompt": [5 + number] * 40, "max_tokens": 2, "deadline_ms": 4000},
            )
        while "stalled_replicas" not in http.get("/health").json():
            time.sleep(0.1)
    return worker


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--device", default="fake")
    parser.add_argument("--step-ms", default="5")
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "sidestep",
        "serve",
        "--port",
        "0",
        "-dp",
        "2",
        "--device",
        args.device,
    ]
    command += ["--fake-step-ms", args.step_ms] if args.device == "fake" else []
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stderr is not None
    url = next(
        found[1] for line in server.stderr if (found := re.match(r"serving \S+ at (\S+)", line))
    )
    threading.Thread(target=server.stderr.read, daemon=True).start()
    spawn = multiprocessing.get_context("spawn")
    try:
        print(f"{'ms at worst':24}{'/health':>10}{'gap':>10}{'asked':>8}{'gaps':>9}{'failed':>9}")
        print(measure(url, args.seconds / 2, args.tokens).row("honest clients alone"), flush=True)
        worker = stop_a_worker(server, url)
        until = time.monotonic() + args.seconds + 2
        hostile = [
            spawn.Process(target=target, args=(url, until))
            for target in (post_large, post_grammars, post_grammars, hold_connections)
        ]
        for process in hostile:
            process.start()
        time.sleep(2)
        print(measure(url, args.seconds, args.tokens).row("hostile clients too"), flush=True)
        for process in hostile:
            process.terminate()
        worker.resume()
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        server.kill()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    main()
