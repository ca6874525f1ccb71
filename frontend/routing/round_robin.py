"""The router that takes the replicas in turn."""

from __future__ import annotations

from collections.abc import Mapping

from sidestep.frontend.routing.router import RoutedRequest, Router


class RoundRobinRouter(Router):
    """A router that takes the replicas in turn and looks at nothing else."""

    def __init__(self, num_blocks: Mapping[int, int], block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._last = -1

    def _pick(self, request: RoutedRequest) -> tuple[int, int]:
        candidates = self.candidates
        self._last = min((r for r in candidates if r > self._last), default=min(candidates))
        return self._last, 0
