"""The options of the placer `ray`: declared, described and checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from sidestep.ipc.common.options import Options, option, parse_mapping, require, require_positive

RAY_SPREADS = ("SPREAD", "STRICT_SPREAD", "PACK")
RAY_NODE_ID = "ray.io/node-id"
"""Ray's label that names a node."""


@dataclass(frozen=True)
class RayConfig(Options):
    """With placer 'ray': the cluster, and the resources that Ray reserves."""

    ray_address: str | None = option(
        None,
        "Ray cluster that is joined, such as 10.0.0.1:6379; 'auto' takes the one that runs on this "
        "machine, 'local' starts one. Default: that of RAY_ADDRESS, else 'local'. A program that "
        "has called ray.init() keeps its own.",
    )
    ray_spread: str = option(
        "SPREAD",
        "How replicas are spread over nodes: 'SPREAD' shares a node once each has its part or none "
        "else has room; 'STRICT_SPREAD' waits for a node without a replica; 'PACK' leaves it to "
        "Ray.",
        choices=RAY_SPREADS,
    )
    ray_ranks_per_host: int | None = option(
        None,
        "Ranks of a replica that must be on one node; the others may be on another. Default: all.",
    )
    ray_gpus: float | None = option(
        None,
        "GPUs that Ray reserves for a rank; 0.5 lets two replicas of one rank share one. Default: "
        "1 where the device is a GPU, else 0.",
    )
    ray_cpus: float = option(
        1.0, "CPUs that Ray reserves for the ranks of a replica on one node, together."
    )
    ray_accelerator_type: str | None = option(
        None, "Kind of GPU that a replica's nodes must have, by Ray's name, such as H100."
    )
    ray_resources: dict[str, Any] | None = option(
        None,
        "Further resources that Ray reserves for the ranks of a replica on one node, as JSON, such "
        "as '{\"fast_disk\": 1}'.",
        parse=parse_mapping,
    )
    ray_labels: dict[str, Any] | None = option(
        None,
        "Labels that a replica's nodes must have, as JSON, in Ray's form of selectors, such as "
        '\'{"zone": "in(a,b)", "ray.io/node-id": "!3f2a"}\'.',
        parse=parse_mapping,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "ray_ranks_per_host")
        for name in ("ray_gpus", "ray_cpus"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value < math.inf,
                name,
                f"must be a number, at least 0, not {value!r}",
            )
        gpus = self.ray_gpus
        require(
            gpus is None or gpus < 1 or gpus == int(gpus),
            "ray_gpus",
            f"must be a whole number, or less than 1, not {gpus!r}",
        )
        for name, amount in (self.ray_resources or {}).items():
            require(
                isinstance(amount, int | float) and 0 < amount < math.inf,
                "ray_resources",
                f"{name!r} must be a number above 0, not {amount!r}",
            )
        self._check_labels(self.ray_labels or {})

    def given(self) -> list[str]:
        """Return the names of the options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    def _check_labels(self, labels: dict[str, Any]) -> None:
        for name, selector in labels.items():
            require(
                isinstance(selector, str),
                "ray_labels",
                f"{name!r} must be a string, not {selector!r}",
            )
        require(
            self.ray_spread != "STRICT_SPREAD" or RAY_NODE_ID not in labels,
            "ray_labels",
            f"{RAY_NODE_ID!r} cannot be given with ray_spread STRICT_SPREAD, which needs it",
        )
