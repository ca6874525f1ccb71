"""The manifest for KubeRay names what the server, the extra and the page have."""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import yaml

from sidestep import EngineArgs
from sidestep.frontend.options.engine_args import engine_options
from tests.pages import text_of
from tests.processes import ROOT
from tests.server.deploy.files import DEPLOY, parsed, server_of


def spec() -> Any:
    manifest = yaml.safe_load((DEPLOY / "kuberay" / "rayjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    return manifest["spec"]


def words() -> list[str]:
    program, *words = shlex.split(spec()["entrypoint"])
    assert program == "sidestep"
    return words


def test_the_command_is_one_of_the_server() -> None:
    server = server_of(words())
    (head,) = spec()["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {port["name"]: port["containerPort"] for port in head["ports"]}["http"] == server.port
    assert server.host == "0.0.0.0"


def test_each_replica_has_a_worker_with_its_resources() -> None:
    args = EngineArgs(**engine_options(parsed(words())))
    cluster = spec()["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert args.placer == "ray" and args.data_parallel_size == group["replicas"]
    (worker,) = group["template"]["spec"]["containers"]
    assert float(worker["resources"]["requests"]["cpu"]) >= args.ray_cpus
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_has_the_version_of_the_extra_and_a_token() -> None:
    cluster = spec()["rayClusterSpec"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["ray"]
    least = re.search(r">=([\d.]+)", extra)
    assert least is not None and cluster["rayVersion"].startswith(least[1])
    assert cluster["authOptions"] == {"mode": "token"}


def test_the_page_has_options_that_are_there() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", text_of("cluster-ray.md"), re.DOTALL)
    assert EngineArgs(**yaml.safe_load(text)).ray_ranks_per_host == 8
