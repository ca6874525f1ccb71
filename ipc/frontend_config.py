"""The options of the process that users talk to: declared, described and checked here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sidestep.ipc.common.options import Options, option, require, require_positive
from sidestep.ipc.common.registry import ROUTERS


@dataclass(frozen=True)
class FrontendConfig(Options):
    """Requests on their way to the engine, and tokens on their way to their readers."""

    seed: int | None = option(
        None,
        "Requests without a seed derive theirs from this number and from their order, so that a "
        "program's runs repeat. Default: each request draws a new one.",
    )

    stream_interval: int = option(
        1,
        "Number of new tokens after which a request's reader wakes; it also wakes at the first "
        "token and at the end. More is cheaper.",
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Most requests of this frontend that may wait to be scheduled; further ones are refused. "
        "Default: 4096 in sidestep serve, else no limit.",
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Most tokens of prompts that may wait; a request whose prompt would exceed them is "
        "refused. Default: no limit.",
    )
    profiler_dir: str | None = option(
        None,
        "Folder that start_profile writes to, one file a rank; the server's routes for profiles "
        "need it.",
    )
    routing: str = option(
        "prefix",
        "With data_parallel_size: which replica takes a request. 'prefix' weighs what each has "
        "cached of the prompt against how much it has to do (without prefix caching as "
        "least_loaded); 'least_loaded' looks at the work in flight alone, 'round_robin' at "
        "nothing.",
        choices=tuple(ROUTERS),
    )

    restart_limit: int = option(
        3,
        "Most times in 10 minutes that a replica is started again after the death of one of its "
        "processes; its requests wait, and go on. After that it stays dead. 0: never.",
    )

    stall_limit: float = option(
        10.0,
        "Seconds without progress, while there is work, after which the processes of a replica are "
        "killed; 20 times the longest step of the last minute if that is more. The replica is then "
        "started again. 0: never.",
    )

    crash_dir: str | None = option(
        None,
        "Folder of the crash files, of which a replica's death leaves one; the newest 8 are kept. "
        "Default: sidestep/crashes in XDG_STATE_HOME, else in ~/.local/state.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.seed is None or self.seed >= 0, "seed", f"must be at least 0, not {self.seed!r}"
        )
        require(
            self.restart_limit >= 0,
            "restart_limit",
            f"must be at least 0, not {self.restart_limit!r}",
        )
        require(
            0 <= self.stall_limit < math.inf,
            "stall_limit",
            f"must be a number of seconds, at least 0, not {self.stall_limit!r}",
        )
        require_positive(self, "stream_interval", "max_num_queued_reqs", "max_num_queued_tokens")
