"""Other projects' clients against this server.

Each snippet is a call that applications make with a library. All snippets of a suite run in one
process, and each is a test of its own. Where a snippet needs certain words from the model, the
model is scripted; elsewhere it is the bundled one. scripts/install_clients.sh installs the
libraries.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.weather_model import answer
from tests.server.live import ROOT, LiveServer
from tests.server.scripted import scripted_server

HERE = Path(__file__).parent
INSTALLED = ROOT / ".clients"
OTHERS_PYTHON = INSTALLED / "venv/bin/python"
MODEL = ROOT / "sidestep/tiny-python"
TEMPLATE = """{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}\
<tool_call>{{ call.function | tojson }}</tool_call>\
{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LIMIT_S = 300
"""Seconds that the snippets of one process may take, on a loaded machine."""


@dataclass(frozen=True)
class Suite:
    """The snippets that one process runs."""

    command: Sequence[str]
    files: Sequence[str]
    pattern: str
    """Regular expression that finds the names of the snippets in a file."""
    needs: Path | None
    """A file that install_clients.sh makes."""

    def names(self) -> list[tuple[str, str]]:
        """Return the file and name of each snippet."""
        return [
            (file, name)
            for file in self.files
            for name in re.findall(
                self.pattern, (HERE / file).read_text(encoding="utf-8"), re.MULTILINE
            )
        ]

    def lacks(self) -> str | None:
        """Return why the suite cannot run here; None if it can."""
        if self.needs is not None and not self.needs.exists():
            return f"{self.needs.relative_to(ROOT)} is missing: run scripts/install_clients.sh"
        if shutil.which(self.command[0]) is None:
            return f"{self.command[0]} is missing"
        return None


_FUNCTION = r"^(?:async )?def ([a-z]\w*)\(\) -> None:"
_OPENAI = ["snippets_openai.py", "snippets_tools.py", "snippets_errors.py", "snippets_responses.py"]
SUITES = {
    "openai": Suite([sys.executable, str(HERE / "run_snippets.py")], _OPENAI, _FUNCTION, None),
    "python": Suite(
        [str(OTHERS_PYTHON), str(HERE / "run_snippets.py")],
        [*_OPENAI, "snippets_langchain.py", "snippets_litellm.py"],
        _FUNCTION,
        INSTALLED / ".installed-python",
    ),
    "node": Suite(
        ["node", str(HERE / "node/run_snippets.mjs")],
        ["node/openai.mjs", "node/ai_sdk.mjs"],
        r"^  async ([a-z]\w*)\(\) \{",
        INSTALLED / ".installed-node",
    ),
    "curl": Suite(
        ["bash", str(HERE / "snippets_curl.sh")], ["snippets_curl.sh"], r"^([a-z]\w*)\(\) \{", None
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Make a folder with the bundled model and a chat template that has tools."""
    folder = tmp_path_factory.mktemp("models") / "tiny-python"
    folder.mkdir()
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def results(
    model: str, fake_model: str, short_answers: list[str]
) -> dict[tuple[str, str, str], str | None]:
    """Run all suites. Return each snippet's traceback, or None, by suite, file and name."""
    with LiveServer(
        model,
        "--served-model-name",
        "tiny-python",
        "--tool-call-parser",
        "hermes",
        *short_answers,
    ) as server:
        return asyncio.run(_run_all(f"{server.url}/v1", fake_model))


async def _run_all(url: str, fake_model: str) -> dict[tuple[str, str, str], str | None]:
    async with scripted_server(fake_model, says=answer, tool_call_parser="hermes") as (_, client):
        scripted = str(client.base_url).rstrip("/")
        made: dict[tuple[str, str, str], str | None] = {}
        for name, suite in SUITES.items():
            if suite.lacks() is None:
                made |= await _run(name, suite, url, scripted)
        return made


async def _run(
    name: str, suite: Suite, url: str, scripted: str
) -> dict[tuple[str, str, str], str | None]:
    process = await asyncio.create_subprocess_exec(
        *suite.command,
        url,
        scripted,
        *suite.files,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OTEL_SDK_DISABLED": "true"},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        process.kill()
        out, err = await process.communicate()
    made: dict[tuple[str, str, str], str | None] = {}
    for line in out.decode().splitlines():
        if line.startswith('{"file"'):
            told = json.loads(line)
            made[name, told["file"], told["name"]] = told["error"]
    words = err.decode(errors="replace")[-3000:]
    for file, snippet in suite.names():
        made.setdefault(
            (name, file, snippet),
            f"it has not run; the process ended with {process.returncode}: {words}",
        )
    return made


_ALL = [(name, *snippet) for name, suite in SUITES.items() for snippet in suite.names()]


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize(("suite", "file", "name"), _ALL)
def test_a_snippet_runs(
    suite: str, file: str, name: str, results: dict[tuple[str, str, str], str | None]
) -> None:
    if (lacks := SUITES[suite].lacks()) is not None:
        pytest.skip(lacks)
    error = results[suite, file, name]
    assert error is None, error


def test_there_are_a_hundred_of_them() -> None:
    assert len({(file, name) for _, file, name in _ALL}) >= 100
