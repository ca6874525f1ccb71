"""The commands in README and docs.

They are the lines of the code blocks, with continuation lines joined.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
URL = "http://127.0.0.1:8000"
"""Address of the server in all examples."""


def text_of(page: str) -> str:
    """Return the text of a page of docs/, or of README.md."""
    return (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text()


def commands(page: str) -> Iterator[str]:
    """Yield each command of a page, on one line and without its comment."""
    for language, block in re.findall(
        r"^```(\w*)\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE
    ):
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.sub(r"(^|\s+)#.*", "", line).strip():
                yield command


def of_sidestep(*pages: str) -> list[str]:
    """Return the commands that run `sidestep`, each once."""
    found = [
        command for page in pages for command in commands(page) if "sidestep" in _words(command)[:3]
    ]
    return list(dict.fromkeys(found))


def with_variables(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words after `sidestep`."""
    words = _words(command)
    at = words.index("sidestep")
    return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :]


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # part of a shell script of several lines
        return command.split()
