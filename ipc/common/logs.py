"""Logs of all processes: one level, one format, on standard error.

A process is started with the settings of its parent, so frontend, core and workers write alike. In
a program that uses the engine as a library, these settings apply only to the engine's own
processes: the program's logging stays as it is.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from sidestep.ipc.common.options import Options, option

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
FIELDS = "fields"
"""Name of a log record's attribute that holds further fields of its JSON object.

It is given as logger.info(text, extra={FIELDS: {}}).
"""


@dataclass(frozen=True)
class LogConfig(Options):
    """Level and format of the log."""

    log_level: str = option(
        "info", "Least level of what is written to standard error.", choices=LEVELS
    )
    log_format: str = option(
        "text",
        "'json' writes each line of every process as one JSON object, with the keys time, level, "
        "process, pid, logger and message.",
        choices=FORMATS,
    )


class JsonFormatter(logging.Formatter):
    """Format a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line without its end."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": _process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Stderr(logging.Handler):
    """Write to the present standard error, one whole line at a time: processes share it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


_config = LogConfig()
_process = "main"
_handler = _Stderr()


def begin(config: LogConfig, process: str) -> None:
    """Set up this process's logging. process: its name in the log."""
    global _config, _process
    _config, _process = config, process
    text = f"%(levelname)s %(asctime)s {process.replace('%', '%%')}: %(message)s"
    _handler.setFormatter(
        JsonFormatter() if config.log_format == "json" else logging.Formatter(text)
    )
    logging.getLogger().addHandler(_handler)  # a handler is not added twice
    logging.getLogger("sidestep").setLevel(config.log_level.upper())


def own_process() -> None:
    """Log warnings and uncaught exceptions too, which else go to standard error directly.

    This is only for processes that belong to the engine.
    """
    if _config.log_format == "json":
        logging.captureWarnings(True)
        sys.excepthook = lambda *error: _log_uncaught(error)
        threading.excepthook = lambda args: _log_uncaught(
            (args.exc_type, args.exc_value, args.exc_traceback)
        )


def _log_uncaught(error: Any) -> None:
    logging.getLogger("sidestep").critical("uncaught exception: %s", error[1], exc_info=error)


def current() -> LogConfig:
    """Return the settings of this process; its children get the same."""
    return _config


def tell(text: str, level: int = logging.INFO) -> None:
    """Write a line for the user who started the command.

    The line is written as it is, or as a record where the log is JSON.
    """
    if _config.log_format == "json":
        logging.getLogger("sidestep").log(level, text)
    elif level >= logging.getLevelNamesMapping()[_config.log_level.upper()]:
        print(text, file=sys.stderr, flush=True)
