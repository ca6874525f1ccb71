"""What README and docs/server.md show works as it is written, but for the port and the size of a load."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sidestep.frontend.server.openapi import OPERATIONS, Operation
from tests.server.live import ROOT, LiveServer

DOCS, README = ((ROOT / name).read_text() for name in ("docs/server.md", "README.md"))


def test_the_openai_client_streams_as_the_docs_show(tiny: LiveServer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code.replace("http://127.0.0.1:8000", tiny.url)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_curl_streams_as_the_readme_shows(tiny: LiveServer) -> None:
    command = re.search(r"^curl (?:.*\\\n)*.*$", README, re.MULTILINE)
    assert command is not None
    done = subprocess.run(["bash", "-c", command[0].replace("http://127.0.0.1:8000", tiny.url)],
                          capture_output=True, text=True)
    assert done.stdout.startswith("data: ") and done.stdout.endswith("data: [DONE]\n\n"), done


def test_a_file_of_requests_is_answered_as_the_docs_show(tmp_path: Path) -> None:
    command = re.search(r"^sidestep run-batch .*$", DOCS, re.MULTILINE)
    assert command is not None
    words = command[0].replace("examples/", f"{ROOT}/examples/").split()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("command", re.findall(r"^(sidestep .* --url [^#\n]*)", DOCS + README, re.MULTILINE))
def test_the_terminal_asks_a_server_as_the_docs_show(command: str, tiny: LiveServer) -> None:
    words = shlex.split(command.replace("http://127.0.0.1:8000", tiny.url))
    words += ["--num-prompts", "4"] * ("bench" in words)
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, input="def get_name(\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_route_is_in_the_docs(operation: Operation) -> None:
    assert operation.path.replace("{model}", "NAME") in DOCS


def test_every_picture_of_the_docs_is_there() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / picture).is_file(), picture


def test_every_metric_is_in_the_docs(fake: LiveServer) -> None:
    for name in re.findall(r"^# TYPE sidestep:(\S+)", fake.http.get("/metrics").text, re.MULTILINE):
        assert name in DOCS, name
