"""Find sentences and lines that break the prose rules, in Markdown pages and in Python files.

`findings` divides a file into blocks (a paragraph, a list item, a table cell, a docstring's
paragraph, a comment) and checks the sentences of each. Code is not prose: fenced and indented
blocks, code spans and Python code are skipped. Headings are titles, so only their phrases count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH = 100
"""Characters that a line may have at most."""

FIRST_WORDS = ("Of", "What", "Those", "Who", "Whose", "That of", "Nobody", "As many")
"""Words that no sentence begins with, but for "Who" and "What" in a question."""

PHRASES = (
    "so many",
    "gives way",
    "give way",
    "is told",
    "are told",
    "how it stands",
    "by the way of",
)
"""Phrases that no sentence has."""

_FIRST = re.compile(
    r"""(?:\A|(?<=[.!?:])[*_"')\]]*\s)\s*[*_"'(\[]*("""
    + "|".join(FIRST_WORDS).replace(" ", r"\s+")
    + r")\b"
)
_END = re.compile(r"""[.!?](?=[*_"')\]]*(?:\s|\Z))""")
_PHRASE = re.compile(r"\b(" + "|".join(PHRASES).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)", re.DOTALL)
_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_HEADING = re.compile(r"#{1,6}\s+")
_URL = re.compile(r"\s*(?:[-*>#]\s+|\[[^\]]+\]:\s+)?\S*https?://\S+")
_OPENING = re.compile(r"""[rRuU]?(\"\"\"|'''|"|')""")


@dataclass(frozen=True)
class Block:
    """A piece of prose: the line on which it begins, and its text without markers.

    Markers are those of lists, comments and headings.
    """

    line: int
    text: str
    is_heading: bool = False


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule."""

    line: int
    message: str


def findings(name: str, text: str) -> list[Finding]:
    """Return the places in a file that break the rules, by line.

    `name` says whether the file is Markdown or Python.
    """
    blocks = python_blocks(text) if name.endswith(".py") else markdown_blocks(text)
    found = [*long_lines(text), *(finding for block in blocks for finding in block_findings(block))]
    return sorted(found, key=lambda finding: finding.line)


def long_lines(text: str) -> Iterator[Finding]:
    """Yield the lines that are too long, but for table rows and lines that are one URL."""
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip(" #")
        is_row = bare.startswith("|") and bare.endswith("|")
        if len(line) > WIDTH and not is_row and not _URL.fullmatch(line):
            yield Finding(number, f"{len(line)} characters in a line")


def block_findings(block: Block) -> Iterator[Finding]:
    """Yield the sentences of a block that begin with a banned word, and its banned phrases."""
    text = _CODE.sub(lambda code: re.sub(r"\S", "x", code[0]), block.text)
    for match in () if block.is_heading else _FIRST.finditer(text):
        end = _END.search(text, match.end())
        if match[1] in ("Who", "What") and end is not None and end[0] == "?":
            continue
        line = block.line + text.count("\n", 0, match.start(1))
        yield Finding(line, f"a sentence begins with {' '.join(match[1].split())!r}")
    for match in _PHRASE.finditer(text):
        phrase = " ".join(match[1].lower().split())
        yield Finding(block.line + text.count("\n", 0, match.start()), f"the phrase {phrase!r}")


def markdown_blocks(text: str, line: int = 1) -> Iterator[Block]:
    """Yield the blocks of a Markdown text whose first line has the number `line`."""
    lines = text.splitlines()
    paragraph: list[str] = []
    fence = ""
    in_list = False

    def ended(number: int) -> Iterator[Block]:
        if paragraph:
            yield Block(number - len(paragraph), "\n".join(paragraph))
            paragraph.clear()

    for number, raw in enumerate(lines, start=line):
        bare = raw.strip()
        if fence:
            fence = "" if bare == fence else fence
        elif opening := re.match(r"`{3,}|~{3,}", bare):
            yield from ended(number)
            fence = opening[0]
        elif not bare or bare.startswith("<!--"):
            yield from ended(number)
        elif bare.startswith("|"):
            yield from ended(number)
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", bare)]
            yield from (Block(number, cell) for cell in cells if cell)
        elif heading := _HEADING.match(raw):
            yield from ended(number)
            yield Block(number, raw[heading.end() :], is_heading=True)
            in_list = False
        elif item := _ITEM.match(raw):
            yield from ended(number)
            paragraph.append(raw[item.end() :])
            in_list = True
        elif paragraph:
            paragraph.append(bare)
        elif raw.startswith("    ") and not in_list:
            continue
        else:
            in_list = in_list and raw.startswith(" ")
            paragraph.append(bare)
    yield from ended(line + len(lines))


def python_blocks(source: str) -> Iterator[Block]:
    """Yield the blocks of a Python file's docstrings and comments.

    The docstrings are those of modules, classes, functions, constants and fields.
    """
    lines = source.splitlines()
    for statement in _statements(ast.parse(source)):
        match statement:
            case ast.Expr(value=ast.Constant(value=str()) as constant):
                yield from markdown_blocks(_docstring(lines, constant), constant.lineno)
    if "#" in source:  # to read a file's tokens takes longer than all else
        for number, text in _comments(source):
            yield from markdown_blocks(text, number)


def _statements(module: ast.Module) -> Iterator[ast.AST]:
    """Yield the statements at all depths; the expressions in them, which are more, are left out."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _docstring(lines: list[str], node: ast.Constant) -> str:
    """Return a docstring as it is written, without its quotes and its indentation."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    inside = lines[node.lineno - 1 : node.end_lineno]
    inside[-1] = inside[-1].encode()[: node.end_col_offset].decode()
    inside[0] = inside[0].encode()[node.col_offset :].decode()
    opening = _OPENING.match(inside[0])
    assert opening is not None, inside[0]
    inside[0] = inside[0][opening.end() :].lstrip()
    inside[-1] = inside[-1].removesuffix(opening[1])
    indent = " " * node.col_offset
    return "\n".join([inside[0], *(line.removeprefix(indent) for line in inside[1:])])


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with the number of its first line.

    Comment lines below one another, in the same column and without code, are one comment.
    """
    first, column, texts = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith("#!"):
            continue
        (number, at), alone = token.start, not token.line[: token.start[1]].strip()
        text = token.string.lstrip("#:").removeprefix(" ")
        if texts and alone and at == column and number == first + len(texts):
            texts.append(text)
            continue
        if texts:
            yield first, "\n".join(texts)
        first, column, texts = number, at if alone else -1, [text]
    if texts:
        yield first, "\n".join(texts)
