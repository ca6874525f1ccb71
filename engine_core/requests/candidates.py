"""The result of a beam's row, for its search."""

from __future__ import annotations

from typing import NamedTuple

from sidestep.ipc.transport.step import Float32, Int32


class Candidates(NamedTuple):
    """Tokens that may follow a beam, and their logprobs, the most probable first."""

    token_ids: Int32
    logprobs: Float32
