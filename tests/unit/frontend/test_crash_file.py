"""Crash files: the newest are kept, each is private, and other files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidestep import EngineArgs, ValidationError
from sidestep.frontend.bench.crash_report import crash_trace, details, summary
from sidestep.frontend.replicas.crash_file import MOST_FILES, CrashFiles, read_crash


def make(folder: Path | None) -> CrashFiles:
    args = EngineArgs(device="fake", crash_dir=None if folder is None else str(folder))
    return CrashFiles(args.create_engine_config(), lambda: [])


def test_the_newest_files_are_kept_and_others_are_not_touched(tmp_path: Path) -> None:
    files = make(tmp_path)
    (tmp_path / "notes.json").write_text("mine")
    written = []
    for number in range(MOST_FILES + 3):
        path = files.write(0, f"cause {number}", "core", None, None)
        assert path is not None
        os.utime(path, ns=(number, number))  # a file system's clock may be coarse
        written.append(path)
    assert set(tmp_path.iterdir()) == {*written[3:], tmp_path / "notes.json"}
    assert read_crash(str(written[-1])).cause == f"cause {MOST_FILES + 2}"


def test_a_core_that_noted_nothing_can_be_reported(tmp_path: Path) -> None:
    path = make(tmp_path).write(1, "it could not start\nand more", "start", None, None)
    crash = read_crash(str(path))
    assert summary(crash)["cause"] == "it could not start" and list(details(crash)) == []
    assert any(event["name"] == "death" for event in crash_trace(crash)["traceEvents"])


def test_the_folder_is_that_of_the_user_s_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = make(None).write(0, "cause", "core", None, None)
    assert path is not None and path.parent == tmp_path / "sidestep" / "crashes"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    assert make(None).write(0, "cause", "core", None, None) is None


@pytest.mark.parametrize("text", ["", "{}", "\x00", '{"format": "other"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValidationError, match="file is no crash file"):
        read_crash(str(tmp_path / "file"))
