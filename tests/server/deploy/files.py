"""The files of deploy/, and the commands of `sidestep` in them."""

from __future__ import annotations

import argparse
import configparser
from collections.abc import Sequence

from sidestep.frontend.main import make_parser
from sidestep.frontend.options.flags import server_args
from sidestep.frontend.options.serve_options import ServerArgs
from tests.processes import ROOT

DEPLOY = ROOT / "deploy"


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command as `sidestep` reads them.

    words: the command without the program. The program ends with a message for an option that it
    does not know.
    """
    found: argparse.Namespace = make_parser("0").parse_args(list(words))
    return found


def server_of(words: Sequence[str]) -> ServerArgs:
    """Return the server's options of a command `serve`."""
    assert words[0] == "serve"
    return server_args(parsed(words))


def unit() -> configparser.ConfigParser:
    """Return the unit for systemd, whose names keep their capitals."""
    found = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "systemd" / "sidestep.service")
    return found


def end_s(server: ServerArgs) -> float:
    """Return the most seconds from SIGTERM to the end of a server's requests."""
    return server.drain_grace + server.shutdown_timeout
