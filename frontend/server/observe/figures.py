"""Counts of one server's processes, in structs that can be sent and added.

Any of the processes can answer with the sum over all of them.
"""

from __future__ import annotations

from typing import Self, TypeVar

import msgspec

K = TypeVar("K")


class HistogramFigures(msgspec.Struct):
    """Number of values in each bucket of a histogram, and the sum of all values."""

    counts: list[int]
    sum: float


class TenantCounts(msgspec.Struct):
    """Counts of one tenant: of one API key, or of all clients of a server without keys."""

    running: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Figures(msgspec.Struct):
    """Counts of one process, or of several processes together."""

    histograms: dict[str, HistogramFigures]
    finished: dict[str, int]
    """Reason of the end -> number of choices."""
    responses: dict[tuple[str, str], int]
    """Route and status -> number of answers."""
    rejections: dict[str, int]
    """Reason -> number of requests that were not admitted."""
    tenants: dict[str, TenantCounts]
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    tokens_received: int
    """Number of tokens so far, those of running requests too."""
    cpu_seconds: float
    last_ttfts: list[float]
    """Seconds to the first token of the last requests."""
    last_gaps: list[float]
    """Seconds between the last tokens."""
    restarts: dict[str, int] = {}
    """Where a death began -> number of starts of replicas after such a death."""
    num_replayed: int = 0
    """Number of requests that were sent again after the death of a replica."""
    num_blamed: int = 0
    """Number of requests that ended as the cause of a replica's death."""
    num_suspects: int = 0
    """Number of requests that run in probation now, or wait for their turn."""
    replay_pause_s: float = 0.0
    """Seconds that requests have waited for a replica to serve again."""
    num_refused_peers: int = 0
    """Number of peers without a key that were refused at ports for other hosts."""
    num_joined: int = 0
    """Number of replicas that have been added because of the load."""
    num_left: int = 0
    """Number of replicas that have been ended because the load did not need them."""
    forecast_s: float = 0.0
    """Seconds until the first token of a request that comes now; of the processes the most."""
    num_processes: int = 1
    """Number of processes that gave their figures just now."""

    @property
    def num_running(self) -> int:
        """Number of choices whose clients wait."""
        return sum(counts.running for counts in self.tenants.values())

    def add(self, other: Self) -> None:
        """Add the figures of another process."""
        for name, histogram in other.histograms.items():
            own = self.histograms[name]
            own.counts = [a + b for a, b in zip(own.counts, histogram.counts, strict=True)]
            own.sum += histogram.sum
        for tenant, counts in other.tenants.items():
            _add_fields(self.tenants.setdefault(tenant, TenantCounts()), counts)
        _add_counts(self.finished, other.finished)
        _add_counts(self.responses, other.responses)
        _add_counts(self.rejections, other.rejections)
        _add_counts(self.restarts, other.restarts)
        self.num_replayed += other.num_replayed
        self.num_blamed += other.num_blamed
        self.num_suspects += other.num_suspects
        self.replay_pause_s += other.replay_pause_s
        self.num_refused_peers += other.num_refused_peers
        self.num_joined += other.num_joined
        self.num_left += other.num_left
        self.forecast_s = max(self.forecast_s, other.forecast_s)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generation_tokens += other.generation_tokens
        self.tokens_received += other.tokens_received
        self.cpu_seconds += other.cpu_seconds
        self.last_ttfts += other.last_ttfts
        self.last_gaps += other.last_gaps
        self.num_processes += other.num_processes

    def end(self) -> None:
        """Keep only what stays true after the end of the process.

        Counters stay, so that no counter falls. Running requests and last values go.
        """
        for counts in self.tenants.values():
            counts.running = 0
        self.last_ttfts, self.last_gaps, self.num_processes = [], [], 0
        self.forecast_s = 0.0


def _add_counts(into: dict[K, int], other: dict[K, int]) -> None:
    for key, count in other.items():
        into[key] = into.get(key, 0) + count


def _add_fields(into: TenantCounts, other: TenantCounts) -> None:
    into.running += other.running
    into.requests += other.requests
    into.prompt_tokens += other.prompt_tokens
    into.generation_tokens += other.generation_tokens
