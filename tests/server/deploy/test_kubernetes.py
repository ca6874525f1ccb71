"""The manifests for Kubernetes are valid, and name what the server has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from sidestep.frontend.options.serve_options import ServerArgs
from tests.server.deploy.files import (
    containerfile,
    end_s,
    manifests,
    metrics_url,
    on_this_machine,
    server_of,
)
from tests.server.live import LiveServer

KINDS = ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"]
PROBES = ["startupProbe", "readinessProbe", "livenessProbe"]


def pod() -> Any:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def container() -> Any:
    (found,) = pod()["containers"]
    return found


def server_args() -> ServerArgs:
    return server_of(container()["args"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", ["1.30", "1.34"])
def test_kubernetes_takes_the_manifest(kind: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(manifests()[kind], version, strict=True)


def test_all_manifests_are_looked_at() -> None:
    assert sorted(manifests()) == KINDS


def test_ports_and_labels_lead_to_the_server() -> None:
    made, args = manifests(), server_args()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"http": args.port, "metrics": args.metrics_port}
    assert args.host == "0.0.0.0" and args.metrics_compat == "vllm"
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for selector in (
        made["Deployment"]["spec"]["selector"]["matchLabels"],
        made["Service"]["spec"]["selector"],
        made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    (port,) = made["Service"]["spec"]["ports"]
    assert port["targetPort"] == "http"
    opened = made["NetworkPolicy"]["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in opened] == ["http", "metrics"]
    assert "from" not in opened[0] and opened[1]["from"]


def test_the_probes_find_what_they_look_for(make_server: Callable[..., LiveServer]) -> None:
    """Start the server with the arguments of the manifest and with keys, and send the probes."""
    server = make_server(
        *on_this_machine(container()["args"]),
        environment={container()["env"][0]["name"]: "key"},
    )
    assert server.post("/v1/completions", {"prompt": "hi"}).status_code == 401
    for probe in PROBES:
        get = container()[probe]["httpGet"]
        assert get["port"] == "metrics"
        assert httpx2.get(metrics_url(server) + get["path"]).status_code == 200
    assert container()["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server.close() == 0


def test_a_drain_fits_the_time_that_kubernetes_waits() -> None:
    args, ready = server_args(), container()["readinessProbe"]
    # The rest is for the engine's end and the last sends.
    assert pod()["terminationGracePeriodSeconds"] >= end_s(args) + 10
    # In the grace a pod is found not ready, and balancers hear of that.
    assert args.drain_grace >= 5 * ready["periodSeconds"] * ready["failureThreshold"]


def test_a_slow_answer_costs_neither_traffic_nor_the_pod() -> None:
    ready, alive = container()["readinessProbe"], container()["livenessProbe"]
    assert ready["failureThreshold"] >= 2 and alive["failureThreshold"] >= 2
    # /health waits five seconds for an engine that does not answer.
    assert alive["timeoutSeconds"] > 5
    assert alive["periodSeconds"] > ready["periodSeconds"]
    start = container()["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600
    assert not {"initialDelaySeconds"} & {key for probe in PROBES for key in container()[probe]}


def test_the_pod_runs_without_rights_and_with_a_read_only_root() -> None:
    user = next(text for name, text in containerfile() if name == "USER")
    assert f"{pod()['securityContext']['runAsUser']}:{pod()['securityContext']['runAsGroup']}" == (
        user
    )
    rights = container()["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    (mount,) = container()["volumeMounts"]
    assert mount["mountPath"] == next(text for name, text in containerfile() if name == "VOLUME")
    assert [volume["name"] for volume in pod()["volumes"]] == [mount["name"]]
