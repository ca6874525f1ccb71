"""The install scripts: torch's CPU build where there is no GPU, else pip's own choice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import cpu_torch; "
    "print(*cpu_torch.pip_arguments(sys.argv[2]))"
)
has_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="this machine has a GPU"
)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """Serve an index that has torch, and return its address."""
    (tmp_path / "whl" / "torch").mkdir(parents=True)
    (tmp_path / "whl" / "torch" / "index.html").write_text("")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/whl"
        server.shutdown()
        thread.join()


def arguments(index: str, *flags: str, path: str = "") -> str:
    """Return the arguments that pip gets.

    With -S Python does not see the libraries of its environment, torch among them.
    """
    done = subprocess.run(
        [sys.executable, "-E", *flags, "-c", CODE, str(SCRIPTS), index],
        capture_output=True,
        text=True,
        env={"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@has_driver
def test_a_machine_without_a_gpu_takes_the_cpu_build(index: str) -> None:
    assert arguments(index, "-S") == f"--index-url {index} torch>=2.11,<2.14"


@has_driver
def test_an_index_that_cannot_be_reached_is_left_alone(index: str) -> None:
    assert arguments("http://127.0.0.1:9/whl", "-S") == ""
    assert arguments(f"{index}/other", "-S") == ""


def test_torch_that_is_installed_stays(index: str) -> None:
    assert arguments(index) == ""


def test_a_machine_with_a_gpu_takes_pips_own_choice(index: str, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert arguments(index, "-S", path=str(tmp_path)) == ""
