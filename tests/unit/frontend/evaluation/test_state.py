"""A state file keeps results, goes on after an interruption and refuses another run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sidestep import ValidationError
from sidestep.frontend.evaluation.state import State

OPTIONS = {"model": {"model": "a", "files": "x"}, "context": 64, "needle": (512,)}


def test_results_are_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with State(path, OPTIONS) as state:
        state.add("model/needle/one", {"found": True})
        state.add("model/needle/two", {"found": False, "value": 0.1})
    with State(path, OPTIONS) as state:
        assert state.results == {
            "model/needle/one": {"found": True},
            "model/needle/two": {"found": False, "value": 0.1},
        }


def test_a_line_that_an_interruption_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with State(str(path), OPTIONS) as state:
        state.add("one", {})
        before = path.read_bytes()
        state.add("two", {})
    whole = path.read_bytes()
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        with State(str(path), OPTIONS) as state:
            assert state.results == {"one": {}}
            state.add("two", {})
        assert path.read_bytes() == whole
    path.write_bytes(whole[:9])  # even the first line
    with State(str(path), OPTIONS) as state:
        assert state.results == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**OPTIONS, "context": 32}, "context was 64, and is 32"),
        ({**OPTIONS, "needle": (512, 9)}, "needle was [512], and is [512, 9]"),
        ({**OPTIONS, "model": {"model": "b", "files": "x"}}, "model.model was 'a', and is 'b'"),
        ({**OPTIONS, "stride": 3}, "stride was None, and is 3"),
    ],
)
def test_the_state_of_another_run_is_refused(
    options: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "state"
    State(str(path), OPTIONS).close()
    before = path.read_bytes()
    with pytest.raises(ValidationError, match=f"^state: .*{re.escape(message)}; give a new file"):
        State(str(path), options)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["hello", "hello\n", '{"a": 1}\n', '{"sidestep_eval":1}\n'])
def test_a_file_of_another_kind_is_left_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ValidationError, match="^state: "):
        State(str(path), OPTIONS)
    assert path.read_text() == content


def test_two_runs_cannot_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    with State(path, OPTIONS), pytest.raises(ValidationError, match="another process uses"):
        State(path, OPTIONS)
