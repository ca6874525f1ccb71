"""The routes that change the engine: what they do, and who may use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.live import LiveServer

COMMANDS = ("/start_profile", "/stop_profile", "/sleep", "/wake_up")
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


def test_a_server_sleeps_and_wakes_up(keyed: LiveServer) -> None:
    def is_sleeping() -> object:
        return keyed.http.get("/is_sleeping").raise_for_status().json()["is_sleeping"]

    for query in ("", "?level=1", "?level=2"):
        assert keyed.http.post(f"/sleep{query}").raise_for_status().json() == {}
        assert is_sleeping() is True
        answer = keyed.http.get("/ready")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "sleeping"
        assert keyed.http.get("/health").status_code == 200
        keyed.http.post("/wake_up").raise_for_status()
        assert is_sleeping() is False and keyed.http.get("/ready").status_code == 200
    keyed.post("/v1/completions", {"prompt": "hi", "max_tokens": 4}).raise_for_status()


@pytest.mark.parametrize("query", ["level=0", "level=3", "level=", "level=1&level=2", "mode=abort"])
def test_a_wrong_sleep_is_refused(query: str, keyed: LiveServer) -> None:
    answer = keyed.http.post(f"/sleep?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_operators_can_ask_for_the_memory_of_the_workers(keyed: LiveServer) -> None:
    answer = keyed.http.get("/memory_use").raise_for_status().json()
    assert answer == {"workers": [{"replica": 0, "rank": 0, "weights": 0, "kv_cache": 0}]}


@pytest.mark.parametrize("path", ["/is_sleeping", "/memory_use"])
def test_users_cannot_ask_for_what_operators_can(
    path: str, keyed: LiveServer, fake: LiveServer
) -> None:
    users = keyed.http.get(path, headers={"authorization": "Bearer ann"})
    assert users.status_code == 403 and fake.http.get(path).status_code == 403
