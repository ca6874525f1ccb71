"""Measure how a body of 16 MB affects the other clients of a server.

    python benchmarks/server/long_texts.py [--max-model-len 2048 400000] [--only WORD ...]
        [--megabytes 16]

For each body, print the longest wait for /health, the longest gap of a stream, and the memory that
the server keeps afterwards. The server runs the fake device with the bundled model's tokenizer,
once with the model's own length and once with a length that lets texts of megabytes reach the
tokenizer. Bodies are posted one at a time; the line `calm` is measured without any body.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from sidestep.ipc.config_sections import DEFAULT_MODEL

MODEL_LEN = 2048
HEADERS = {"content-type": "application/json"}
CODE = "def get_name(self, value):\n    return self.values[value] + 12345\n"


def filled(before: str, unit: str, after: str, size: int) -> bytes:
    """Return a body of about `size` bytes: `before`, then `unit` repeated, then `after`."""
    return (
        before + unit * ((size - len(before) - len(after)) // len(unit.encode())) + after
    ).encode()


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name, the route and the bytes of each body."""
    code = json.dumps(CODE)[1:-1]
    message, end = '{"messages":[{"role":"user","content":"', '"}],"max_tokens":1}'
    yield "code", "/v1/completions", filled('{"prompt":"', code, '"}', size)
    yield "one letter", "/v1/completions", filled('{"prompt":"', "a", '"}', size)
    yield "spaces", "/v1/completions", filled('{"prompt":"', " ", '"}', size)
    yield "Chinese", "/v1/completions", filled('{"prompt":"', "中", '"}', size)
    yield "commas", "/v1/completions", filled('{"prompt":"', ",", '"}', size)
    yield "token ids", "/v1/completions", filled('{"prompt":[', "1,", "1]}", size)
    yield "lists of ids", "/v1/completions", filled('{"prompt":[', "[1],", "[1]]}", size)
    yield "chat", "/v1/chat/completions", filled(message, code, end, size)
    yield (
        "messages",
        "/v1/chat/completions",
        filled(
            '{"messages":[',
            '{"role":"user","content":"a"},',
            '{"role":"user","content":"a"}]}',
            size,
        ),
    )
    yield (
        "long messages",
        "/v1/chat/completions",
        filled(
            '{"messages":[',
            '{"role":"user","content":"' + code * 2 + '"},',
            '{"role":"user","content":"a"}]}',
            size,
        ),
    )
    tool = '{"type":"function","function":{"name":"a","description":"' + code * 2 + '"}}'
    yield (
        "tools",
        "/v1/chat/completions",
        filled(
            '{"messages":[{"role":"user","content":"a"}],"tools":[', tool + ",", tool + "]}", size
        ),
    )
    yield (
        "variables",
        "/v1/chat/completions",
        filled(message + '"}],"chat_template_kwargs":{"a":[', "[],", "[]]}}", size),
    )
    yield "responses", "/v1/responses", filled('{"input":"', code, '"}', size)
    yield "tokenize", "/tokenize", filled('{"prompt":"', code, '"}', size)
    yield "tokenize chat", "/tokenize", filled(message, code, '"}]}', size)
    yield "detokenize", "/detokenize", filled('{"tokens":[', "100,", "100]}", size)
    yield "detok. 1 MB", "/detokenize", filled('{"tokens":[', "100,", "100]}", size // 16)


class Server:
    """Process of `sidestep serve` on the fake device."""

    def __init__(self, model: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "sidestep",
                "serve",
                model,
                "--device",
                "fake",
                "--fake-step-ms",
                "5",
                "--port",
                "0",
                "--num-kv-blocks",
                "50000",
                "--tool-call-parser",
                "hermes",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if (found := re.search(r"at http://127.0.0.1:(\d+)", line)) is not None:
                break
        else:
            raise SystemExit("the server has not started")
        self.port = int(found[1])

    def connect(self) -> http.client.HTTPConnection:
        """Open a connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)

    def megabytes(self) -> float:
        """Return the resident memory of the process that answers, in MB."""
        return float(psutil.Process(self.process.pid).memory_info().rss) / 1e6

    def close(self) -> None:
        """End the server."""
        self.process.terminate()
        self.process.wait()


class Watch:
    """Client that asks for /health and reads a stream for the time of a `with` block."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=target) for target in (self._ask, self._read)]
        self.health = self.gap = self.peak = 0.0

    def __enter__(self) -> Watch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        connection = self._server.connect()
        while not self._ends.wait(0.01):
            begin = time.perf_counter()
            connection.request("GET", "/health")
            connection.getresponse().read()
            self.health = max(self.health, time.perf_counter() - begin)
            self.peak = max(self.peak, self._server.megabytes())

    def _read(self) -> None:
        connection = self._server.connect()
        body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        while not self._ends.is_set():
            connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
            answer, last = connection.getresponse(), 0.0
            while not self._ends.is_set() and answer.readline():
                now = time.perf_counter()
                self.gap, last = max(self.gap, now - last if last else 0.0), now
            connection.close()


def post(server: Server, path: str, body: bytes) -> int:
    """Send a body in pieces, and return the status of the answer."""
    connection = server.connect()
    connection.request("POST", path, body, HEADERS)
    try:
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        connection.close()


def measure(server: Server, name: str, path: str, body: bytes) -> None:
    """Print the line of one body."""
    before, begin = server.megabytes(), time.perf_counter()
    with Watch(server) as watch:
        time.sleep(0.5)
        status = post(server, path, body) if body else 0
        took = time.perf_counter() - begin - 0.5
        time.sleep(0.5)
    print(
        f"{name:14} {path:21} {status:6} {took:8.2f} {watch.health:11.3f} {watch.gap:8.3f} "
        f"{watch.peak - before:+9.0f} {server.megabytes() - before:+7.0f}",
        flush=True,
    )


def longer_model(length: int, folder: Path) -> str:
    """Copy the bundled model with another length and without weights, and return its folder.

    The fake device does not read weights.
    """
    made = folder / f"model-{length}"
    shutil.copytree(DEFAULT_MODEL, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    return str(made)


def main() -> None:
    """Measure all bodies on each server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-model-len", type=int, nargs="+", default=[MODEL_LEN, 400_000])
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--only", nargs="+", default=[], help="names of bodies")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for length in wanted.max_model_len:
            print(
                f"max_model_len {length}\n{'body':14} {'route':21} {'status':>6} {'answer s':>8} "
                f"{'health max s':>11} {'gap s':>8} {'peak MB':>9} {'left MB':>7}"
            )
            server = Server(longer_model(length, Path(folder)))
            try:
                measure(server, "calm", "", b"")
                for name, path, body in bodies(int(wanted.megabytes * (1 << 20)) - 100):
                    if not wanted.only or name in wanted.only:
                        measure(server, name, path, body)
            finally:
                server.close()


if __name__ == "__main__":
    main()
