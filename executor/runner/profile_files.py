"""The files that profiles are written to: one a rank, as JSON for Chrome's and Perfetto's viewers.

No torch here: the fake runner must start without it.
"""

from __future__ import annotations

import os
import time

from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError


def make_folder(folder: str) -> None:
    """Make the folder of a profile, if it is not there. Raises CallRefusedError."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise CallRefusedError(f"{folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise CallRefusedError(f"{folder} cannot be written to")


def profile_file(folder: str, args: WorkerArgs) -> str:
    """Return a new path for this rank's profile. Viewers know the end of the name."""
    replica = f"replica{args.replica}-" if args.parallel.most_replicas > 1 else ""
    name = f"{replica}rank{args.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
    return os.path.join(folder, name)
