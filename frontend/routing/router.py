"""Which replica takes a request: the interface, and the books that every router keeps.

A router is synchronous and pure: it reads no clock, waits for nothing, and knows what its own
frontend has sent and what of that has ended. Frontends that share an engine each have one and do
not talk to each other: each spreads its own requests evenly, so all of them together do.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

SEQUENCE_TOKENS = 256
"""A sequence in flight weighs as much as so many tokens of prompt that must be computed: each of
its tokens takes a row of a step, and how many will come nobody knows."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """What a router looks at."""

    handle: int
    token_ids: bytes
    """int32: the prompt, and what has been generated already."""
    num_sequences: int = 1
    """Choices or beams, which stay together."""
    cache_salt: str | None = None
    num_public_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """To be known before the first new one."""
        return len(self.token_ids) // 4


class Router(abc.ABC):
    """Spreads requests over the replicas that live. One of them must when `choose` is called."""

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        """num_blocks: how many KV blocks of `block_size` tokens each replica has, by its number."""
        self._loads = dict.fromkeys(num_blocks, 0)
        self._suspended: set[int] = set()
        self._in_flight: dict[int, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loads={self._loads})"

    @property
    def loads(self) -> dict[int, int]:
        """Of each replica that lives: the work in flight, in tokens to compute."""
        return dict(self._loads)

    def choose(self, request: RoutedRequest) -> int:
        """The replica that takes it. Until `finished`, or that replica's death, it counts as in
        flight there.
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
        """Return the load of each replica that may be chosen now: the replicas that are not
        suspended, or else all live ones.
        """
        if not self._suspended:
            return self._loads
        open_ones = {r: load for r, load in self._loads.items() if r not in self._suspended}
        return open_ones or self._loads

    def finished(self, handle: int) -> None:
        """The request has ended, however it did."""
        replica, work = self._in_flight.pop(handle)
        self._loads[replica] -= work

    def dead(self, replica: int) -> None:
        """It takes nothing any more, and nothing is in flight there."""
        del self._loads[replica]
        self._suspended.discard(replica)
        for handle in [h for h, (at, _) in self._in_flight.items() if at == replica]:
            del self._in_flight[handle]

    @abc.abstractmethod
    def _pick(self, request: RoutedRequest) -> tuple[int, int]:
        """Return one of `self.candidates`, and the number of the request's tokens that it need not
        compute.
        """
