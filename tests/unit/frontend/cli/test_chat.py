"""The terminal chat with scripted lines and a scripted engine.

tests/e2e tests it in a real terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sidestep import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    ValidationError,
)
from sidestep.frontend.cli import chat as cli_chat
from sidestep.frontend.cli.chat_input import Interrupted, Lines, Terminal
from sidestep.frontend.main import main
from sidestep.ipc.config import state_folder_of_environment
from sidestep.ipc.config_sections import DEFAULT_MODEL
from sidestep.ipc.model.model_spec import resolve_model_path

USER, ASSISTANT = "user", "assistant"


class Engine:
    """A stand-in for AsyncLLM: it answers with the number of messages."""

    sampling_defaults: ClassVar[dict[str, float]] = {}

    def __init__(self) -> None:
        self.seen: list[list[tuple[str, str]]] = []
        self.num_shutdowns = 0

    async def generate(
        self, messages: Any, params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        self.seen.append([(m["role"], m["content"]) for m in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise ValidationError("prompt", "has 999 tokens")
        for piece in ("answer ", str(len(messages))):
            yield RequestOutput(
                "", None, [], [CompletionOutput(0, piece, [])], False, RequestMetrics(0.0)
            )
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
def interrupts() -> Iterator[None]:
    """Let Ctrl-C work as in a terminal, also if the tests were started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def close_input(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.stdin
    yield
    if sys.stdin is not before:
        sys.stdin.close()


def test_a_conversation_remembers_until_it_is_reset(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(
        monkeypatch,
        tmp_path,
        "hi",
        "",
        "again",
        "/what",
        "/reset",
        "anew",
        "/clear",
        "/usr/bin?",
        "/exit",
        "never read",
    )
    assert main(["chat", "--system", "Be brief."]) == 0
    system = ("system", "Be brief.")
    assert engine.seen == [
        [system, (USER, "hi")],
        [system, (USER, "hi"), (ASSISTANT, "answer 2"), (USER, "again")],
        [system, (USER, "anew")],
        [system, (USER, "/usr/bin?")],
    ]
    shown = capsys.readouterr()
    assert "> answer 2\n> > answer 4\n" in shown.out
    assert "There is no command /what.\n" in shown.err and "/system TEXT" in shown.err
    assert engine.num_shutdowns == 1


def test_a_message_that_is_refused_is_told_and_forgotten(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(monkeypatch, tmp_path, "too long", "hi")
    assert main(["chat"]) == 0
    assert engine.seen[-1] == [(USER, "hi")]
    assert "sidestep: prompt: has 999 tokens\n" in capsys.readouterr().err


def test_the_system_message_can_be_shown_changed_and_removed(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    say(monkeypatch, tmp_path, "/system", "/system Be\tbrief.", "hi", "/system -", "again", "/help")
    assert main(["chat"]) == 0
    assert engine.seen == [
        [("system", "Be\tbrief."), (USER, "hi")],
        [(USER, "hi"), (ASSISTANT, "answer 2"), (USER, "again")],
    ]
    told = capsys.readouterr().err
    assert told.count("There is no system message.") == 2 and "System message: Be\tbrief." in told
    assert "\x1b" not in told  # no terminal, no colours


def test_a_model_without_a_template_is_refused_before_the_engine_starts(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "base-model"
    shutil.copytree(resolve_model_path(DEFAULT_MODEL), model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["chat", str(model)]) == 1
    assert capsys.readouterr().err == (
        f"sidestep: model: {model} has no chat template, so it cannot chat; "
        "`sidestep generate` completes text with it\n"
    )
    assert engine.num_shutdowns == 0


@contextmanager
def terminal(*keys: str) -> Iterator[None]:
    """Make standard input a terminal in which these keys are typed."""
    with create_pipe_input() as typed, create_app_session(input=typed, output=DummyOutput()):
        for each in keys:
            typed.send_text(each)
        yield


PASTE = "\x1b[200~{}\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hi\r", "hi"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        (
            PASTE.format("def f():\n    return 1\n\n") + "what is this?\r",
            "def f():\n    return 1\n\nwhat is this?",
        ),
        ("ab\x1b[Dx\r", "axb"),
        ("half a line\x03whole\r", "whole"),
    ],
    ids=["line", "backslash", "alt-enter", "pasted", "edited", "cleared"],
)
async def test_what_is_typed_is_one_message(keys: str, message: str) -> None:
    with terminal(keys):
        assert await Terminal(None).ask("> ") == message


async def test_ctrl_c_at_an_empty_prompt_and_ctrl_d_leave() -> None:
    with terminal("\x03"), pytest.raises(Interrupted):
        await Terminal(None).ask("> ")
    with terminal("\x04"):
        assert await Terminal(None).ask("> ") is None


async def test_messages_are_remembered_in_a_file_of_the_user_s_own(tmp_path: Path) -> None:
    folder, before = tmp_path / "state" / "sidestep", os.umask(0)
    try:
        with terminal("first\r", "second\r"):
            first = Terminal(folder)
            assert [await first.ask("> "), await first.ask("> ")] == ["first", "second"]
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "chat_history").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with terminal("\x1b[A\x1b[A\r"):  # twice up
        assert await Terminal(folder).ask("> ") == "first"


async def test_a_home_that_cannot_be_written_costs_the_history_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with terminal("hi\r"):
        assert await Terminal(tmp_path / "file" / "sidestep").ask("> ") == "hi"


def test_the_state_folder_is_where_the_desktop_s_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    monkeypatch.setenv("XDG_STATE_HOME", "/elsewhere")
    assert state_folder_of_environment() == Path("/elsewhere/sidestep")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder_of_environment() == Path("/home/one/.local/state/sidestep")


def test_ctrl_c_stops_an_answer_and_keeps_what_has_come(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    say(monkeypatch, tmp_path, "stop me", "hi")
    assert main(["chat"]) == 0
    assert engine.seen[-1] == [(USER, "stop me"), (ASSISTANT, "answer "), (USER, "hi")]


async def test_lines_are_read_from_a_pipe_however_they_come(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, into = os.pipe()
    lines = Lines(out)
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
    waiting = asyncio.create_task(Lines(out).ask(""))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not asyncio.get_running_loop().remove_reader(out)
    os.close(out)
    os.close(into)
