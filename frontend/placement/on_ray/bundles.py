"""The resources that Ray is asked for, and the nodes that a replica keeps off. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sidestep.frontend.placement.on_ray.cluster import Node
from sidestep.ipc.common.options import require
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.ray_config import RAY_NODE_ID

_TRACE = 0.001
"""Amount of a kind of GPU's resource that Ray itself asks for to choose nodes with the kind."""


def ranks_by_host(config: EngineConfig) -> list[int]:
    """Return the number of ranks of a replica on each of its hosts."""
    num_ranks = config.parallel.num_ranks
    each = min(config.ray.ray_ranks_per_host or num_ranks, num_ranks)
    return [min(each, num_ranks - first) for first in range(0, num_ranks, each)]


def bundle(config: EngineConfig, num_ranks: int, cluster_has_gpus: bool) -> dict[str, float]:
    """Return the resources for some ranks of a replica that share a node.

    cluster_has_gpus: whether device 'auto' means GPUs.
    """
    ray, device = config.ray, config.parallel.device
    gpus = ray.ray_gpus
    if gpus is None:
        gpus = 1.0 if device == "cuda" or (device == "auto" and cluster_has_gpus) else 0.0
    require(
        num_ranks == 1 or gpus == int(gpus),
        "ray_gpus",
        f"{gpus} of a GPU cannot be had by each of {num_ranks} ranks: they would share one",
    )
    wanted = {"CPU": ray.ray_cpus, "GPU": gpus * num_ranks, **(ray.ray_resources or {})}
    if ray.ray_accelerator_type is not None:
        wanted[f"accelerator_type:{ray.ray_accelerator_type}"] = _TRACE
    return {name: float(amount) for name, amount in wanted.items() if amount}


def fits(node: Node, wanted: dict[str, float]) -> bool:
    """Return whether a node that is empty has these resources."""
    return all(node.resources.get(name, 0.0) >= amount for name, amount in wanted.items())


def avoided(
    spread: str, taken: Iterable[str], nodes: Sequence[Node], wanted: dict[str, float]
) -> frozenset[str]:
    """Return the ids of the nodes on which a replica should not be.

    taken: the id of the node of each host of the other replicas, as often as it has one. With
    SPREAD, these are the nodes that have more of them than another that would fit.
    """
    counts = Counter(taken)
    if spread == "PACK":
        return frozenset()
    if spread == "STRICT_SPREAD":
        return frozenset(counts)
    candidates = [node.id for node in nodes if fits(node, wanted)]
    least = min((counts[node] for node in candidates), default=0)
    return frozenset(node for node in candidates if counts[node] > least)


def selector(labels: dict[str, str], avoid: frozenset[str]) -> dict[str, str]:
    """Return Ray's selector of the nodes that have these labels and are none of those avoided.

    A selector has one condition for each label: labels that name nodes themselves are the stronger.
    """
    if not avoid or RAY_NODE_ID in labels:
        return dict(labels)
    return {**labels, RAY_NODE_ID: f"!in({','.join(sorted(avoid))})"}
