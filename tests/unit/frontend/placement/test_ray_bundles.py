"""Resources that Ray is asked for, and nodes that replicas keep off; Ray is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from sidestep import EngineArgs, ValidationError
from sidestep.frontend.placement.on_ray.bundles import (
    avoided,
    bundle,
    ranks_by_host,
    selector,
)
from sidestep.frontend.placement.on_ray.cluster import Node
from sidestep.ipc.config import EngineConfig


def config(**options: Any) -> EngineConfig:
    return EngineArgs(**{"device": "fake", "placer": "ray", **options}).create_engine_config()


def nodes(**cpus: float) -> list[Node]:
    return [Node(name, "10.0.0.1", {"CPU": number}) for name, number in cpus.items()]


def test_ranks_share_a_node_unless_told_otherwise() -> None:
    assert ranks_by_host(config(tensor_parallel_size=4)) == [4]
    assert ranks_by_host(config(tensor_parallel_size=4, ray_ranks_per_host=2)) == [2, 2]
    assert ranks_by_host(config(pipeline_parallel_size=3, ray_ranks_per_host=2)) == [2, 1]
    assert ranks_by_host(config(ray_ranks_per_host=8)) == [1]


@pytest.mark.parametrize(
    "options, has_gpus, wanted",
    [
        ({}, True, {"CPU": 1.0}),
        ({"device": "cpu", "ray_cpus": 4}, True, {"CPU": 4.0}),
        ({"device": "auto"}, False, {"CPU": 1.0}),
        ({"device": "auto"}, True, {"CPU": 1.0, "GPU": 2.0}),
        ({"device": "cuda", "ray_gpus": 2}, True, {"CPU": 1.0, "GPU": 4.0}),
        ({"ray_cpus": 0, "ray_resources": {"disk": 2}}, False, {"disk": 2.0}),
        (
            {"device": "cuda", "ray_accelerator_type": "H100"},
            True,
            {"CPU": 1.0, "GPU": 2.0, "accelerator_type:H100": 0.001},
        ),
    ],
)
def test_a_bundle_has_what_the_options_name(
    options: dict[str, Any], has_gpus: bool, wanted: dict[str, float]
) -> None:
    assert bundle(config(**options), 2, has_gpus) == wanted


def test_a_part_of_a_gpu_is_for_one_rank() -> None:
    half = config(device="cuda", ray_gpus=0.5)
    assert bundle(half, 1, True) == {"CPU": 1.0, "GPU": 0.5}
    with pytest.raises(ValidationError, match="ray_gpus"):
        bundle(half, 2, True)


def test_spread_avoids_the_nodes_with_more_replicas_than_another_that_fits() -> None:
    wanted, three = {"CPU": 1.0}, nodes(a=4, b=4, small=0)
    assert avoided("SPREAD", [], three, wanted) == set()
    assert avoided("SPREAD", ["a"], three, wanted) == {"a"}
    assert avoided("SPREAD", ["a", "b"], three, wanted) == set()
    assert avoided("SPREAD", ["a", "a", "b"], three, wanted) == {"a"}
    assert avoided("SPREAD", ["gone"], three, wanted) == set()


def test_strict_spread_avoids_every_node_with_a_replica_and_pack_none() -> None:
    assert avoided("STRICT_SPREAD", ["a", "b"], nodes(a=4, b=4), {"CPU": 1.0}) == {"a", "b"}
    assert avoided("PACK", ["a", "b"], nodes(a=4, b=4), {"CPU": 1.0}) == set()


def test_labels_and_avoided_nodes_become_one_selector() -> None:
    labels = {"zone": "in(x,y)"}
    assert selector(labels, frozenset()) == labels
    assert selector(labels, frozenset("ba")) == {**labels, "ray.io/node-id": "!in(a,b)"}
    named = {"ray.io/node-id": "a"}
    assert selector(named, frozenset("b")) == named


@pytest.mark.parametrize(
    "option, value",
    [
        ("ray_gpus", 1.5),
        ("ray_gpus", -1),
        ("ray_cpus", float("inf")),
        ("ray_spread", "EVEN"),
        ("ray_ranks_per_host", 0),
        ("ray_resources", {"disk": 0}),
        ("ray_resources", "disk"),
        ("ray_labels", {"zone": 1}),
    ],
)
def test_an_option_that_ray_could_not_use_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=option):
        EngineArgs(**{option: value})


def test_a_strict_spread_leaves_the_choice_of_nodes_to_itself() -> None:
    labels = {"ray.io/node-id": "a"}
    assert EngineArgs(ray_labels=labels).ray_labels == labels
    with pytest.raises(ValidationError, match="STRICT_SPREAD"):
        EngineArgs(ray_labels=labels, ray_spread="STRICT_SPREAD")


def test_an_option_of_ray_is_refused_where_ray_places_nothing() -> None:
    with pytest.raises(ValidationError, match="ray_cpus.*placer 'local'"):
        EngineArgs(device="fake", ray_cpus=4).create_engine_config()
