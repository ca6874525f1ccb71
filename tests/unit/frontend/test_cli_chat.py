"""The terminal chat with scripted lines and a scripted engine; tests/e2e has it in a real terminal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidestep import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams, ValidationError
from sidestep.frontend import cli_chat
from sidestep.frontend.cli import main
from sidestep.frontend.cli_chat import LineReader

USER, ASSISTANT = "user", "assistant"


class Engine:
    """In the place of AsyncLLM: answers with the number of messages."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []
        self.num_shutdowns = 0

    async def generate(self, messages: Any, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        self.seen.append([(m["role"], m["content"]) for m in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise ValidationError("prompt", "has 999 tokens")
        for piece in ("answer ", str(len(messages))):
            yield RequestOutput("", None, [], [CompletionOutput(0, piece, [])], False, RequestMetrics(0.0))
            if text == "stop me":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.get_running_loop().create_future()

    def shutdown(self) -> None:
        self.num_shutdowns += 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(cli_chat, "start_engine", lambda arguments: engine)
    return engine


def say(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    (folder / "input").write_text("".join(line + "\n" for line in lines))
    monkeypatch.setattr(sys, "stdin", (folder / "input").open())


@pytest.fixture(autouse=True)
def close_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.stdin
    yield
    if sys.stdin is not before:
        sys.stdin.close()


def test_a_conversation_remembers_until_it_is_reset(
        engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(monkeypatch, tmp_path, "hi", "", "again", "/what", "/reset", "anew", "/exit", "never read")
    assert main(["chat", "--system", "Be brief."]) == 0
    system = ("system", "Be brief.")
    assert engine.seen == [
        [system, (USER, "hi")],
        [system, (USER, "hi"), (ASSISTANT, "answer 2"), (USER, "again")],
        [system, (USER, "anew")]]
    shown = capsys.readouterr()
    assert "> answer 2\n> > answer 4\n" in shown.out and shown.err.count("/reset forgets") == 2
    assert engine.num_shutdowns == 1


def test_a_message_that_is_refused_is_told_and_forgotten(
        engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(monkeypatch, tmp_path, "too long", "hi")
    assert main(["chat"]) == 0
    assert engine.seen[-1] == [(USER, "hi")]
    assert "sidestep: prompt: has 999 tokens\n" in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_keeps_what_has_come(
        engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    say(monkeypatch, tmp_path, "stop me", "hi")
    assert main(["chat"]) == 0
    assert engine.seen[-1] == [(USER, "stop me"), (ASSISTANT, "answer "), (USER, "hi")]


async def test_lines_are_read_from_a_pipe_however_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    out, into = os.pipe()
    lines = LineReader(out)
    waiting = asyncio.create_task(lines.ask("> "))
    for piece in (b"na\xc3", b"\xafve \ntwo\nthr"):
        await asyncio.sleep(0)
        os.write(into, piece)
    assert await waiting == "naïve"
    assert await lines.ask("> ") == "two"
    os.close(into)
    assert [await lines.ask("> "), await lines.ask("> ")] == ["thr", None]
    assert capsys.readouterr().out == "> " * 4
    os.close(out)


async def test_waiting_for_a_line_can_be_cancelled() -> None:
    out, into = os.pipe()
    waiting = asyncio.create_task(LineReader(out).ask(""))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not asyncio.get_running_loop().remove_reader(out)
    os.close(out)
    os.close(into)
