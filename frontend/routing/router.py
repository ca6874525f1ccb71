"""The interface of a router, which chooses the replica of a request, and its accounts of load.

A router is synchronous and pure: it reads no clock and waits for nothing. It knows the requests
that its own frontend has sent and which of them have ended. Each of the frontends that share an
engine has a router, and the routers do not talk to each other. Each spreads its own requests
evenly, so all of them together do.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

SEQUENCE_TOKENS = 256
"""Tokens of prompt to compute that weigh as much as one sequence in flight.

Each token of a sequence takes a row of a step, and the number of its tokens is not known before.
"""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """The part of a request that a router looks at."""

    handle: int
    token_ids: bytes
    """The token ids of the prompt and of the output so far, as int32."""
    num_sequences: int = 1
    """Number of choices or beams, which all run on one replica."""
    cache_salt: str | None = None
    num_public_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens that must be computed or cached before the first new one."""
        return len(self.token_ids) // 4


class Router(abc.ABC):
    """The base of routers, which spread requests over the live replicas.

    One replica must be alive when `choose` is called. A replica that has died may come `back`.
    """

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        """Begin with replicas that are all idle.

        num_blocks: the number of KV blocks of `block_size` tokens that each replica has, by the
        replica's number.
        """
        self._loads = dict.fromkeys(num_blocks, 0)
        self._suspended: set[int] = set()
        self._in_flight: dict[int, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loads={self._loads})"

    @property
    def loads(self) -> dict[int, int]:
        """The work in flight of each live replica, in tokens to compute."""
        return dict(self._loads)

    def choose(self, request: RoutedRequest) -> int:
        """Return the replica that takes a request.

        The request counts as in flight there until `finished`, or until the replica's death.
        """
        replica, num_cached = self._pick(request)
        work = request.num_tokens - num_cached + SEQUENCE_TOKENS * request.num_sequences
        self._in_flight[request.handle] = replica, work
        self._loads[replica] += work
        return replica

    def suspend(self, replica: int) -> None:
        """Choose this replica only while all others are suspended or dead too, until `resume`."""
        self._suspended.add(replica)

    def resume(self, replica: int) -> None:
        """Choose this replica again. A replica that was not suspended stays as it is."""
        self._suspended.discard(replica)

    @property
    def candidates(self) -> dict[int, int]:
        """The load of each replica that may be chosen now.

        These are the replicas that are not suspended, or all live replicas if every one is
        suspended.
        """
        if not self._suspended:
            return self._loads
        open_ones = {r: load for r, load in self._loads.items() if r not in self._suspended}
        return open_ones or self._loads

    def work_of(self, handle: int) -> int:
        """Return the work of a request in flight, in tokens to compute."""
        return self._in_flight[handle][1]

    def finished(self, handle: int) -> None:
        """Remove the load of a request that has ended, for whatever reason."""
        replica, work = self._in_flight.pop(handle)
        self._loads[replica] -= work

    def dead(self, replica: int) -> None:
        """Remove a replica that has died, with all that is in flight there."""
        del self._loads[replica]
        self._suspended.discard(replica)
        for handle in [h for h, (at, _) in self._in_flight.items() if at == replica]:
            del self._in_flight[handle]

    def back(self, replica: int, num_blocks: int) -> None:
        """Add a replica that has been started again: it is idle, and its cache is empty.

        num_blocks: the number of KV blocks that it has now.
        """
        self._loads[replica] = 0

    @abc.abstractmethod
    def _pick(self, request: RoutedRequest) -> tuple[int, int]:
        """Return the chosen replica and the request's number of cached tokens there.

        The replica is one of `self.candidates`; it need not compute the cached tokens.
        """
