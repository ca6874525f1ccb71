"""Copy docs/ to where the docs site is built from, and check the site when it is built.

scripts/docs.sh runs both: `python -m scripts.docs_site copy`, then `check`. Pages of docs/ link to
files beside docs/ (examples, tests), which the site generator would neither copy nor check. The
copy has a page for each of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "docs"
SITE = ROOT / "site"
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_LANGUAGES = {
    ".py": "python",
    ".mjs": "javascript",
    ".sh": "bash",
    ".yaml": "yaml",
    ".toml": "toml",
}
_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that make a browser load a file by itself, and the attribute that names it."""
_BLOCK_IN_TEXT = re.compile(r"\n\s*(- |\* |1\. |\|)")
"""A list or a table that Python-Markdown reads as text, as it has no empty line before it."""


class BrokenDocs(Exception):
    """Pages or links that are wrong. The text has one line for each."""


def copy_docs(docs: Path = ROOT / "docs", to: Path = COPY) -> None:
    """Copy `docs` to `to`, with a page under sources/ for each file outside that a page links to.

    Raises BrokenDocs where a link names a file that does not exist.
    """
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(docs, to)
    problems: list[str] = []
    pages = {page: page.relative_to(docs) for page in sorted(docs.rglob("*.md"))}
    waiting = list(pages)
    while waiting:
        source = waiting.pop()
        lines = []
        for number, line in enumerate(_text_of(source, docs.parent).splitlines(), 1):
            for target in _targets(source, line):
                path, _, fragment = target.partition("#")
                file = (source.parent / path).resolve()
                if not file.exists() or not file.is_relative_to(docs.parent):
                    problems.append(f"{source.relative_to(docs.parent)}:{number}: no file {target}")
                    continue
                if file not in pages and not file.is_relative_to(docs):
                    pages[file] = _page_of(file.relative_to(docs.parent))
                    waiting.append(file)
                place = pages.get(file) or file.relative_to(docs)
                new = os.path.relpath(to / place, (to / pages[source]).parent)
                line = line.replace(f"]({target})", f"]({new}{'#' * bool(fragment)}{fragment})")
            lines.append(line)
        page = to / pages[source]
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text("\n".join(lines) + "\n")
    if problems:
        raise BrokenDocs("\n".join(problems))


def check_site(site: Path = SITE) -> None:
    """Check each page of a built site.

    Raises BrokenDocs with each link, picture and anchor that leads nowhere, each file that a
    browser would load from another host, and each list or table that became text.
    """
    pages = {path: _Page.read(path) for path in sorted(site.rglob("*.html"))}
    problems = [
        f"{path.relative_to(site)}: {problem}"
        for path in pages
        for problem in _problems(site, path, pages)
    ]
    if not pages:
        problems.append(f"{site} has no pages")
    if problems:
        raise BrokenDocs("\n".join(problems))


@dataclass
class _Page(HTMLParser):
    """A page of the site: its anchors, its links and its paragraphs."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def read(cls, path: Path) -> _Page:
        page = cls()
        page.feed(path.read_text())
        page.close()
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if (target := values.get(_LOADED.get(tag, ""))) is not None:
            self.loaded.append(target)
            self.links.append(target)
        elif tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "p":
            self.paragraphs.append("")

    def handle_data(self, data: str) -> None:
        if self.paragraphs:
            self.paragraphs[-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self.paragraphs.append("")


def _problems(site: Path, path: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    page = pages[path]
    for target in page.loaded:
        if urlsplit(target).netloc:
            yield f"loads {target} from another host"
    for target in page.links:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        start = site if parts.path.startswith("/") else path.parent
        file = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
        file = file / "index.html" if file.is_dir() else file
        if not file.is_file():
            yield f"no file {target}"
        elif file in pages and unquote(parts.fragment) not in {"", *pages[file].anchors}:
            yield f"no anchor {target}"
    for paragraph in page.paragraphs:
        if (found := _BLOCK_IN_TEXT.search(paragraph)) is not None:
            start_of_block = paragraph[found.start() :].strip()[:60]
            yield f"a list or table has no empty line before it: {start_of_block!r}"


def _page_of(path: Path) -> Path:
    """Return the page for a file outside docs/."""
    name = path.name if path.suffix == ".md" else f"{path.name}.md"
    return Path("sources") / path.with_name(name)


def _targets(source: Path, line: str) -> list[str]:
    """Return the files that a line of a page links to."""
    if source.suffix != ".md":
        return []
    return [
        target
        for target in _LINK.findall(line)
        if "://" not in target and not target.startswith(("#", "mailto:"))
    ]


def _text_of(file: Path, root: Path) -> str:
    """Return a page's Markdown, or that of a page that shows a file, or all sources of a folder."""
    if file.suffix == ".md":
        return file.read_text()
    files = (
        [file]
        if file.is_file()
        else sorted(
            path
            for path in file.rglob("*")
            if path.suffix in _LANGUAGES and "__pycache__" not in path.parts
        )
    )
    parts = [f"# {file.relative_to(root)}"]
    for path in files:
        heading = [] if path == file else [f"## {path.relative_to(file)}"]
        language = _LANGUAGES.get(path.suffix, "")
        parts += [*heading, f"````{language}\n{path.read_text().rstrip()}\n````"]
    return "\n\n".join(parts)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "copy":
            copy_docs()
        else:
            check_site()
    except BrokenDocs as error:
        sys.exit(str(error))
