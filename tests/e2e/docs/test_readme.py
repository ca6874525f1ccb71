"""The examples of the README work as they are written."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.pages import of_sidestep
from tests.processes import run

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    command
    for command in of_sidestep("README.md")
    if not command.startswith("sidestep serve") and "--url" not in command
]  # tests/server runs the commands that start a server


def test_the_example_is_the_file_it_names() -> None:
    assert PYTHON[0] == (ROOT / "examples" / "stream.py").read_text()


@pytest.mark.parametrize("code", PYTHON, ids=["AsyncLLM", "LLM"])
def test_examples_run_and_print_a_completion(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code)
    done = run(sys.executable, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path) -> None:
    small = {
        "throughput": ["--num-prompts", "4"],
        "latency": ["--num-iters", "1"],
        "serve": ["--num-prompts", "4"],
    }
    words = [
        str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)
    ]
    more = next((extra for word, extra in small.items() if word in words), [])
    done = run(
        *(sys.executable, "-m", "sidestep", *words[1:], *more),
        input="hello\n/exit\n",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or (tmp_path / "answers.jsonl").read_text()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        path, _, section = target.partition("#")
        assert (ROOT / path).exists(), target
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M) if section else []
        assert not section or section in [
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        ], target
