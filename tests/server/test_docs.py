"""What README and docs/server.md show works as it is written, but for the port."""

from __future__ import annotations

import re
import subprocess
import sys

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


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_route_is_in_the_docs(operation: Operation) -> None:
    assert operation.path.replace("{model}", "NAME") in DOCS


def test_every_metric_is_in_the_docs(fake: LiveServer) -> None:
    for name in re.findall(r"^# TYPE sidestep:(\S+)", fake.http.get("/metrics").text, re.MULTILINE):
        assert name in DOCS, name
