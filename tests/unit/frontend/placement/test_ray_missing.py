"""The error in a program without Ray, or with an old one, says how to install it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from sidestep import EngineStartError
from sidestep.frontend.placement.on_ray.cluster import import_ray, last_line


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineStartError, match=r"pip install 'sidestep\[ray\]'"):
        import_ray()


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("ray")
    old.__dict__["__version__"] = "2.9.3"
    monkeypatch.setitem(sys.modules, "ray", old)
    with pytest.raises(EngineStartError, match="2.60 or newer, not 2.9.3"):
        import_ray()


def test_the_end_of_a_trace_is_told() -> None:
    assert last_line(RuntimeError("Traceback\n  File\nOSError: no memory\n\n")) == (
        "OSError: no memory"
    )
    assert last_line(TimeoutError()) == "TimeoutError"
