"""A server in processes of its own, for loads that come from here."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serving(*words: str, **options: object) -> Iterator[tuple[str, int]]:
    """Yield the URL and the first process of a server with these words and options.

    max_num_seqs=16 is the option `--max-num-seqs 16`. The server ends with the block.
    """
    command = [sys.executable, "-m", "sidestep", "serve", "--port", "0", *words]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stderr is not None
        log = list[str]()
        url = None
        for line in server.stderr:
            log.append(line)
            if (found := re.match(r"serving \S+ at (\S+)", line)) is not None:
                url = found[1]
                break
        if url is None:
            raise SystemExit("".join(log))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        try:
            yield url, server.pid
        finally:
            server.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()
