"""Logs: the same lines from every process, as text or as one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sidestep.ipc.common import logs
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.logs import FIELDS, LogConfig
from sidestep.ipc.processes.process import spawn

logger = logging.getLogger("sidestep.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    logs.begin(LogConfig(), "main")


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().err.splitlines()[-1])


def test_a_record_is_one_object_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin(LogConfig(log_format="json"), "server")
    logger.warning("%d lines\nof text", 2, extra={FIELDS: {"request_id": "r1"}})
    line = last_line(capsys)
    assert (line["level"], line["process"], line["logger"]) == (
        "warning",
        "server",
        "sidestep.test",
    )
    assert line["message"] == "2 lines\nof text" and line["request_id"] == "r1"
    assert line["time"].endswith("Z") and line["pid"]


def test_an_exception_is_in_its_record(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin(LogConfig(log_format="json"), "server")
    try:
        raise KeyError("gone")
    except KeyError:
        logger.exception("failed")
    assert "KeyError: 'gone'" in last_line(capsys)["exception"]


def test_the_level_is_the_least_that_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin(LogConfig(log_level="warning"), "server")
    logger.info("not this")
    logs.tell("nor this")
    logger.warning("this")
    logs.tell("and this", logging.ERROR)
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0].startswith("WARNING ")
        and said[0].endswith(" server: this")
        and said[1:] == ["and this"]
    )


def test_what_is_told_is_a_record_where_the_log_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    logs.tell("serving")
    assert capsys.readouterr().err == "serving\n"
    logs.begin(LogConfig(log_format="json"), "server")
    logs.tell("serving")
    assert last_line(capsys)["message"] == "serving"


@pytest.mark.parametrize("name", ["log_level", "log_format"])
def test_other_settings_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=name):
        LogConfig(**{name: "loud"})


def test_a_child_logs_as_it_was_started(capfd: pytest.CaptureFixture[str]) -> None:
    child = spawn(
        "worker 7",
        "tests.unit.ipc.children:log_and_fail",
        None,
        log_config=LogConfig(log_format="json"),
    )
    assert child.wait(60)
    child.stop()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["process"], line["level"], line["message"]) for line in lines] == [
        ("worker 7", "info", "about to fail"),
        ("worker 7", "warning", lines[1]["message"]),
        ("worker 7", "critical", "uncaught exception: no more"),
    ]
    assert "FutureWarning: soon" in lines[1]["message"] and "RuntimeError" in lines[2]["exception"]
    assert sys.excepthook is sys.__excepthook__ or sys.excepthook.__module__ != logs.__name__
