"""Prose keeps to its rules: sentences begin with their subject, lines have at most 100 characters.

CONTRIBUTING.md has the rules; tests/prose.py finds the places that break them.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from tests.prose import FIRST_WORDS, PHRASES, WIDTH, findings

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("docs/*.md", "docs/**/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


@functools.cache
def broken() -> dict[str, list[str]]:
    """Return each place that breaks a rule, as "file:line: message", by file.

    The files are those that git tracks; symbolic links are left out.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files, and this is not a checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py", *PAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    return {
        name: [
            f"{name}:{place.line}: {place.message}"
            for place in findings(name, (ROOT / name).read_text())
        ]
        for name in names
        if not (ROOT / name).is_symlink()
    }


def test_prose_keeps_to_the_rules() -> None:
    wrong = [place for places in broken().values() for place in places]
    assert not wrong, "\n".join(["prose that breaks a rule:", *wrong])


def test_pages_and_sources_are_looked_at() -> None:
    assert {"README.md", "docs/server.md", "ipc/config.py", "tests/prose.py"} <= broken().keys()


def places(name: str, text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.message.split("'")[1]) for finding in findings(name, text)]


def page(text: str) -> list[tuple[int, str]]:
    return places("page.md", text)


def module(text: str) -> list[tuple[int, str]]:
    return places("module.py", text)


@pytest.mark.parametrize("word", FIRST_WORDS)
def test_a_sentence_may_not_begin_with_a_bare_word(word: str) -> None:
    assert page(f"{word} the engine runs.") == [(1, word)]
    assert page(f"Blocks are free.\nThe engine runs. {word} it runs\nis freed.") == [(2, word)]
    assert page(f"**{word} runs** is freed.") == page(f'"{word} runs" is freed.') == [(1, word)]
    assert page(f"The engine {word.lower()} runs. {word}ever runs is freed.") == []


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_may_not_occur(phrase: str) -> None:
    assert page(f"The engine has\n{phrase} of these.") == [(2, phrase)]
    assert page(f"## The engine has {phrase}") == [(1, phrase)]
    assert page(f"The engine has `{phrase}` of these.") == []
    assert page(f"The engine has x{phrase}") == page(f"The engine has {phrase}x") == []


def test_a_phrase_is_found_across_lines() -> None:
    assert page("The cache holds so\nmany blocks.") == [(1, "so many")]


def test_questions_may_begin_with_who_and_what() -> None:
    assert page("What is slow? Who calls? The client.") == []
    assert page("What is slow. Is it?") == [(1, "What")]
    assert page("Whose block is it? Those of whom?") == [(1, "Whose"), (1, "Those")]


def test_a_sentence_ends_in_quotes_brackets_and_bold() -> None:
    assert page('It says "no." What follows is text.') == [(1, "What")]
    assert page("(It is one.) What follows is text.") == [(1, "What")]
    assert page("**Limits.** Those of the engine.") == [(1, "Those")]
    assert page("A file a.What is named so.") == []


def test_code_is_no_prose() -> None:
    assert page("Text.\n\n```\nWhat is it.\n\nOf it, so many.\n```\n\nOf the text.") == [(9, "Of")]
    assert page("Text:\n\n    What is indented.\n\nOf the text.") == [(5, "Of")]
    assert page("`What` is a word. `Of\nit` too. Those too.") == [(2, "Those")]
    assert page("- item\n\n  ```\n  What is in it.\n  ```\n- Of it") == [(6, "Of")]


def test_each_item_and_cell_is_a_block() -> None:
    text = "Items:\n- Of one\n- of two, and\n  What goes on.\n  1. Those\n"
    assert page(text) == [(2, "Of"), (5, "Those")]
    assert page("- one\n\n  What follows it.") == [(3, "What")]
    assert page("- one\n\n      What follows it.") == [(3, "What")]
    text = "| name | what |\n|---|---|\n| Of it | a cell |\n| a \\| Of | What |"
    assert page(text) == [(3, "Of"), (4, "What")]


def test_headings_are_titles_and_html_comments_are_passed_over() -> None:
    assert page("# What it runs\nOf the engine.\n<!-- What is generated. -->") == [(2, "Of")]


def test_docstrings_are_read_with_their_lines() -> None:
    assert module('"""What a module is.\n\nOf it.\n"""\n') == [(1, "What"), (3, "Of")]
    source = 'def f():\n    """Return it.\n\n    Those\n    are told.\n    """\n    return "Of"\n'
    assert module(source) == [(4, "Those"), (5, "are told")]
    assert module("class A:\n    x: int\n    r'''Of the field.'''\n") == [(3, "Of")]
    assert module('X = 1\n"""Whose number it is."""\nY = "Of"\n') == [(2, "Whose")]
    assert module('def f():\n    """Return ü. What\n    is left."""\n') == [(2, "What")]


def test_comments_are_read_with_their_lines() -> None:
    assert module("x = 1  # What it is.\n# Of it.\n") == [(1, "What"), (2, "Of")]
    assert module("# A comment that goes\n# What ends here. Those are\n# free.\n") == [(2, "Those")]
    assert module("# The cache has so\n# many blocks.\nx = 1\n") == [(1, "so many")]
    assert module("x = '# What'\ny = 1  # the first. Who\nz = 2  # runs it?\n") == [(2, "Who")]
    assert module("#!/usr/bin/env python\n#: Of a field\n") == [(2, "Of")]


def test_long_lines_are_found() -> None:
    text = "x" * WIDTH
    assert findings("page.md", f"{text}\n{text}x\n") == [findings("page.md", f"\n{text}x")[0]]
    (code,) = findings("module.py", f"X = '{text}'\n")
    assert (code.line, code.message) == (1, f"{WIDTH + 6} characters in a line")
    assert findings("page.md", f"```\n{text}x\n```")[0].line == 2


def test_table_rows_and_urls_may_be_long() -> None:
    text = "x" * WIDTH
    url = f"https://example.org/{text}"
    assert findings("page.md", f"| {text} |\n{url}\n- {url}\n[x]: {url}\n[x]({url})") == []
    assert findings("module.py", f"# | {text} |\n# {url}\n") == []
    assert len(findings("page.md", f"| {text}\nSee {url}\n{url} has it")) == 3
