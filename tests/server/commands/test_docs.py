"""The commands of README and docs, run as they are written.

Only the device, the port and the size of a load differ. tests/e2e/docs/test_readme.py runs the
commands of the README with the bundled model.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import options_page
from sidestep.frontend.main import make_parser
from sidestep.frontend.server.openapi import OPERATIONS, Operation
from tests import pages
from tests.pages import URL, of_sidestep, with_variables
from tests.processes import run
from tests.server.live import ROOT, LiveServer

POOLING = "pooling.md"
"""Page whose requests need a server with --runner pooling."""
DOCS, README = pages.text_of("server.md"), pages.text_of("README.md")
COMMANDS = of_sidestep("README.md", *pages.DOCS)
SMALL = {
    "throughput": ["--num-prompts", "4"],
    "latency": ["--num-iters", "1", "--batch-size", "2"],
    "serve": ["--num-prompts", "4"],
}
FAKE = {"SIDESTEP_DEVICE": "fake"}
"""The fake device, because the commands can be tested without weights."""
CPU = {"SIDESTEP_DEVICE": "cpu"}
"""The device of commands that need a model: the fake one gives no log-probabilities of prompts."""


def runs_here(command: str) -> bool:
    """Return whether a command starts an engine of its own, or none, and ends by itself."""
    return (
        "--url" not in command
        and "compile-kernels" not in command  # tests/triton/compiling runs it, which takes long
        and "--crash" not in command  # tests/integration/recovery runs it, after a death
        and not is_server(command)
        and not is_of_hosts(command)
        and command not in of_sidestep("README.md")
    )


def is_server(command: str) -> bool:
    return with_variables(command)[1][0] == "serve" and not is_of_hosts(command)


def is_of_hosts(command: str) -> bool:
    """Return whether a command is of several hosts; tests/server/deploy/test_hosts.py runs it."""
    return with_variables(command)[1][0] == "node" or "--placer join" in command


def starts_here(command: str) -> bool:
    """Return whether a server needs nothing else; tests/ray_cluster starts those on Ray."""
    return is_server(command) and "--placer" not in command


def test_the_openai_client_streams_as_the_docs_show(tiny: LiveServer) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    done = run(sys.executable, "-c", code.replace("http://127.0.0.1:8000", tiny.url))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def curls(*docs: str) -> list[str]:
    return [c for page in docs for c in pages.commands(page) if c.startswith("curl ")]


@pytest.mark.parametrize("command", curls(*(page for page in pages.DOCS if page != POOLING)))
def test_curl_of_the_docs_is_answered(command: str, tiny: LiveServer) -> None:
    run_curl(command, tiny)


@pytest.mark.parametrize("command", curls(POOLING))
def test_curl_of_the_page_on_vectors_is_answered(command: str, embedding: LiveServer) -> None:
    run_curl(command, embedding)


def test_the_script_of_the_page_on_vectors_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", pages.text_of(POOLING), re.DOTALL)
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 + 1 + 2


def run_curl(command: str, server: LiveServer) -> None:
    words = shlex.split(command.replace(URL, server.url))
    done = run(*words, "--silent", "--show-error", "--fail")
    assert done.returncode == 0 and done.stdout, done


@pytest.mark.parametrize("page", ["README.md", *pages.DOCS])
def test_what_other_commands_of_a_page_name_is_there(page: str) -> None:
    """Check that the extras, packages and scripts of other commands exist.

    Commands that install, or take minutes, are not run.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for command in pages.commands(page):
        if "pip install" in command:
            for named in re.findall(r"(?:sidestep|\.)\[([\w,]+)\]", command):
                assert set(named.split(",")) <= extras.keys(), command
        for file in re.findall(
            r"(?<!\S)(?:scripts|examples|benchmarks|tests|deploy)/[\w./-]+", command
        ):
            assert (ROOT / file).exists(), command


def test_curl_streams_as_the_readme_shows(tiny: LiveServer) -> None:
    command = re.search(r"^curl (?:.*\\\n)*.*$", README, re.MULTILINE)
    assert command is not None
    done = run("bash", "-c", command[0].replace("http://127.0.0.1:8000", tiny.url))
    assert done.stdout.startswith("data: ") and done.stdout.endswith("data: [DONE]\n\n"), done


def test_a_file_of_requests_is_answered_as_the_docs_show(tmp_path: Path) -> None:
    command = re.search(r"^sidestep run-batch .*$", DOCS, re.MULTILINE)
    assert command is not None
    words = command[0].replace("examples/", f"{ROOT}/examples/").split()
    done = run(sys.executable, "-m", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if runs_here(c)])
def test_a_command_of_the_docs_runs(command: str, tmp_path: Path) -> None:
    variables, words = with_variables(command)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    more = SMALL.get(words[1], []) if words[0] == "bench" else []
    done = run(
        *(sys.executable, "-m", "sidestep", *words, *more),
        input="def get_name(\n",
        cwd=tmp_path,
        env=os.environ | (CPU if words[0] == "eval" else FAKE) | variables,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or (tmp_path / "answers.jsonl").read_text()


@pytest.mark.parametrize("command", [c for c in COMMANDS if "compile-kernels" in c])
def test_the_docs_compile_kernels_with_known_options(command: str) -> None:
    parsed = make_parser("0").parse_args(with_variables(command)[1])
    assert parsed.command == "compile-kernels"


@pytest.mark.parametrize("command", [c for c in COMMANDS if starts_here(c)])
def test_a_server_of_the_docs_starts(command: str) -> None:
    variables, words = with_variables(command)
    given = [word for word in words[1:] if word != "MODEL"]
    with LiveServer(*given, environment=FAKE | variables) as server:
        assert server.http.get("/ready").status_code == 200
    assert server.process.returncode == 0, server.log


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--url" in c])
def test_the_terminal_asks_a_server_as_the_docs_show(command: str, tiny: LiveServer) -> None:
    words = shlex.split(command.replace(URL, tiny.url))
    words += ["--num-prompts", "4"] * ("bench" in words)
    done = run(sys.executable, "-m", *words, input="def get_name(\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.path)
def test_every_route_is_in_the_docs(operation: Operation) -> None:
    assert operation.path.replace("{model}", "NAME") in DOCS


def test_the_page_of_options_is_what_the_fields_say() -> None:
    assert options_page.PAGE.read_text() == options_page.page(), (
        "run: python -m scripts.options_page"
    )


@pytest.mark.parametrize("page", pages.DOCS)
def test_every_link_of_the_docs_leads_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", pages.text_of(page)):
        path, _, section = target.partition("#")
        if "://" in target:
            continue
        source = ROOT / "docs" / page
        file = source.parent / path if path else source
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if section else []
        slugs = [re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not section or section in slugs, target


def test_every_picture_of_the_docs_is_there() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / picture).is_file(), picture


def test_every_metric_is_in_the_docs(fake: LiveServer) -> None:
    text = DOCS + pages.text_of("recovery.md")
    for name in re.findall(r"^# TYPE sidestep:(\S+)", fake.http.get("/metrics").text, re.MULTILINE):
        assert name in text, name
