"""The options of the number of replicas: declared, described and checked here."""

from __future__ import annotations

from dataclasses import dataclass

from sidestep.ipc.common.options import Options, option, require, require_positive


@dataclass(frozen=True)
class ScalingConfig(Options):
    """When replicas join and leave. They have a meaning with max_replicas alone."""

    min_replicas: int | None = option(
        None,
        "With max_replicas: fewest replicas that stay. Default: 1.",
    )
    scale_up_ttft: float | None = option(
        None,
        "With max_replicas: a replica joins when a new request is foreseen to wait longer than "
        "this for its first token, in seconds. Default: 1.",
    )
    scale_down_after: float | None = option(
        None,
        "With max_replicas: seconds without need of a replica after which it leaves. Default: 300.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "min_replicas")
        for name in ("scale_up_ttft", "scale_down_after"):
            value = getattr(self, name)
            require(value is None or value > 0, name, f"must be above 0, not {value!r}")

    def check(self, num_at_start: int, scales: bool) -> None:
        """Raise ValidationError for options that do not fit the replicas.

        num_at_start: data_parallel_size. scales: whether max_replicas is given.
        """
        for name in ("min_replicas", "scale_up_ttft", "scale_down_after"):
            require(
                scales or getattr(self, name) is None, name, "has a meaning only with max_replicas"
            )
        require(
            (self.min_replicas or 1) <= num_at_start,
            "min_replicas",
            f"{self.min_replicas} is more than data_parallel_size ({num_at_start}), the number at "
            "the start",
        )
