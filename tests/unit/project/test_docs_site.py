"""The docs site fails to build where a page leads nowhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from scripts.docs_site import BrokenDocs, check_site, copy_docs
from sidestep.ipc.common import registry
from tests import pages

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (
    "ipc",
    "kernels",
    "executor",
    "engine_core",
    "frontend",
    "tests",
    "scripts",
    "benchmarks",
)
"""Folders that pages name files of; the first five hold the package's code."""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Return a docs folder with one page, beside a folder of examples."""
    (tmp_path / "docs" / "inside").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "one.py").write_text("print(1)\n")
    text = "# Page\n\n[a](../../examples/one.py) [b](page.md#page)\n"
    (tmp_path / "docs" / "inside" / "page.md").write_text(text)
    return tmp_path / "docs"


def test_the_copy_has_a_page_for_each_file_that_is_linked(docs: Path, tmp_path: Path) -> None:
    copy_docs(docs, tmp_path / "copy")
    page = (tmp_path / "copy" / "inside" / "page.md").read_text()
    assert "[a](../sources/examples/one.py.md) [b](page.md#page)" in page
    assert "print(1)" in (tmp_path / "copy" / "sources" / "examples" / "one.py.md").read_text()


def test_a_link_to_a_missing_file_is_an_error_with_its_line(docs: Path, tmp_path: Path) -> None:
    (docs / "other.md").write_text("# Other\n\n[a](../examples/two.py)\n")
    with pytest.raises(BrokenDocs, match=r"^docs/other\.md:3: no file \.\./examples/two\.py$"):
        copy_docs(docs, tmp_path / "copy")


@pytest.mark.parametrize(
    "body, problem",
    [
        ('<a href="none.html">a</a>', "no file none.html"),
        ('<img src="images/none.png">', "no file images/none.png"),
        ('<a href="#none">a</a>', "no anchor #none"),
        ('<a href="index.html#none">a</a>', "no anchor index.html#none"),
        (
            '<script src="https://example.org/a.js"></script>',
            "loads https://example.org/a.js from another host",
        ),
        ("<p>These:\n- one\n- two</p>", "a list or table has no empty line before it: '- one"),
    ],
)
def test_a_site_that_leads_nowhere_is_an_error(body: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<h1 id="here">Here</h1> <a href="#here">a</a>')
    check_site(tmp_path)
    (tmp_path / "page.html").write_text(body)
    with pytest.raises(BrokenDocs, match=f"^page.html: {re.escape(problem)}"):
        check_site(tmp_path)


def test_a_site_without_pages_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenDocs, match="has no pages"):
        check_site(tmp_path)


def test_each_page_of_the_docs_is_in_the_navigation_once() -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert sorted(_pages_of(nav)) == pages.DOCS


@pytest.mark.parametrize("page", ["README.md", *pages.DOCS])
def test_each_file_that_a_page_names_exists(page: str) -> None:
    """A name with a placeholder, `executor/models/<name>.py`, is no file."""
    for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]+)`", pages.text_of(page)):
        assert (ROOT / name).exists(), name


def test_the_architecture_page_has_each_folder_of_the_code() -> None:
    text = pages.text_of("architecture.md")
    code = [file for folder in FOLDERS[:5] for file in (ROOT / folder).rglob("*.*")]
    folders = {file.parent.relative_to(ROOT).as_posix() for file in code if file.is_file()}
    assert {name for name in folders if "__pycache__" not in name} <= set(_folders_of(text))


def test_the_page_of_models_has_each_architecture_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", pages.text_of("models.md"), re.MULTILINE)
    assert rows == sorted(registry.MODELS, key=str.lower)


def _folders_of(text: str) -> list[str]:
    """Return the folders of the page's tree, where two spaces more are one level deeper."""
    names: list[str] = []
    found: list[str] = []
    for indent, name in re.findall(r"^((?:  )*)([\w/]+)/(?:,| )", text, re.MULTILINE):
        names[len(indent) // 2 :] = [name]
        found.append("/".join(names))
    return found


def _pages_of(entries: list[dict[str, Any]]) -> list[str]:
    values = [value for entry in entries for value in entry.values()]
    nested = [_pages_of(value) if isinstance(value, list) else [value] for value in values]
    return [page for pages_of_one in nested for page in pages_of_one]
