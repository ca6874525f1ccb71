"""Log-probabilities on their way from a step's rows to the requests of each frontend."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from sidestep.engine_core.requests.life import RequestStatus
from sidestep.engine_core.requests.request import Request
from sidestep.ipc.transport.step import LogprobColumns, UInt8


def share_logprobs(
    column: UInt8, requests: Sequence[Request], late: Collection[Request] = ()
) -> Iterator[tuple[int, bytes]]:
    """Yield the log-probabilities for each frontend, with its number.

    requests: the requests that the keys of the columns are indices of. Skipped are requests that
    have ended, requests that are late and have sampled nothing that counts, and beams, for which
    the beam search reads the column.
    """
    if not len(column):
        return
    columns = LogprobColumns.unpack(column)
    owners = [requests[key] for key in columns.keys.tolist()]
    handles = np.array([owner.handle for owner in owners], np.int32)
    clients = np.array(
        [
            owner.client
            if owner.status is not RequestStatus.FINISHED
            and owner not in late
            and not owner.is_beam
            else -1
            for owner in owners
        ]
    )
    for client in np.unique(clients[clients >= 0]).tolist():
        chosen = clients == client
        yield client, columns.of(chosen, handles[chosen]).pack().tobytes()
