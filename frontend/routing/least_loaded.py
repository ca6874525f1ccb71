"""The router that chooses the replica with the least work in flight."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.frontend.routing.router import RoutedRequest, Router


class LeastLoadedRouter(Router):
    """A router that chooses the least loaded replica.

    Among equally loaded replicas it chooses the one that has waited longest for a request.
    """

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._turns = dict.fromkeys(num_blocks, 0)
        self._turn = 0

    def back(self, replica: int, num_blocks: int) -> None:
        """Add a replica that has been started again, as the one that has waited longest."""
        super().back(replica, num_blocks)
        self._turns[replica] = 0

    def _pick(self, request: RoutedRequest) -> tuple[int, int]:
        candidates = self.candidates
        replica = min(candidates, key=lambda r: (candidates[r], self._turns[r]))
        self._turn += 1
        self._turns[replica] = self._turn
        return replica, 0
