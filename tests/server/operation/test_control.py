"""The routes that change the engine: what they do, and who may use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer

COMMANDS = ("/start_profile", "/stop_profile")
ENVIRONMENT = {"SIDESTEP_API_KEYS": "ann", "SIDESTEP_OPERATOR_KEYS": "boss"}


@pytest.fixture(scope="module")
def keyed(fake_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(
        fake_model,
        "--served-model-name",
        "fake",
        "--device",
        "fake",
        "--profiler-dir",
        str(tmp_path_factory.mktemp("profiles")),
        environment=ENVIRONMENT,
        key="boss",
    ) as server:
        yield server


@pytest.mark.parametrize("path", COMMANDS)
def test_without_an_operators_key_they_are_refused(
    path: str, keyed: LiveServer, fake: LiveServer
) -> None:
    """A server without keys refuses them too: anyone might reach it."""
    refusals = [
        fake.http.post(path),
        keyed.http.post(path, headers={"authorization": "Bearer ann"}),
    ]
    for answer in refusals:
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "operator_key_needed"
    answer = keyed.http.post(path, headers={"authorization": "Bearer eve"})
    assert answer.status_code == 401


def test_a_profile_is_recorded_from_start_to_stop(keyed: LiveServer) -> None:
    assert keyed.http.post("/start_profile").raise_for_status().json() == {}
    keyed.post("/v1/completions", {"prompt": "hi", "max_tokens": 4}).raise_for_status()
    (file,) = keyed.http.post("/stop_profile").raise_for_status().json()["files"]
    assert len(json.loads(Path(file).read_text())["traceEvents"]) >= 4


def test_what_the_workers_refuse_is_a_conflict(keyed: LiveServer) -> None:
    answer = keyed.http.post("/stop_profile")
    assert answer.status_code == 409
    assert "no profile is being recorded" in answer.json()["error"]["message"]


def test_unknown_parameters_are_refused_by_name(keyed: LiveServer) -> None:
    answer = keyed.http.post("/start_profile?folder=/etc")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "folder"
