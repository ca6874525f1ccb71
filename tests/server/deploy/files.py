"""The files of deploy/, and the commands of `sidestep` in them."""

from __future__ import annotations

import argparse
import configparser
import re
from collections.abc import Sequence
from typing import Any

import yaml

from sidestep.frontend.main import make_parser
from sidestep.frontend.options.flags import server_args
from sidestep.frontend.options.serve_options import ServerArgs
from tests.processes import ROOT
from tests.server.live import LiveServer

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


def containerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Containerfile, each with its arguments on one line."""
    text = (DEPLOY / "container" / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = [line.partition(" ") for line in joined.splitlines() if line.strip()]
    return [(name, arguments.strip()) for name, _, arguments in found]


def manifests() -> dict[str, Any]:
    """Return the manifests for Kubernetes by their kinds."""
    found = [yaml.safe_load(path.read_text()) for path in (DEPLOY / "kubernetes").glob("*.yaml")]
    return {manifest["kind"]: manifest for manifest in found}


def on_this_machine(words: Sequence[str]) -> list[str]:
    """Return the options of a server with free ports, another model and no grace.

    words: the command `serve`; each option and its value are one word or two.
    """
    options = iter(" ".join(words[1:]).replace("=", " ").split())
    changed = {"--metrics-port": "0", "--drain-grace": "0"}
    found: list[str] = []
    for name in options:
        value = next(options)
        if name not in ("--host", "--port", "--model"):
            found += [name, changed.get(name, value)]
    return found


def metrics_url(server: LiveServer) -> str:
    """Return the URL of a server's port of metrics."""
    found = re.search(r"metrics at (\S+)/metrics", server.log)
    assert found is not None, server.log
    return found[1]
