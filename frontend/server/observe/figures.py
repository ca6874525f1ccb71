"""What the processes of one server have counted, so that it can be added up: whoever asks, asks any
one of them.
"""

from __future__ import annotations

from typing import Self, TypeVar

import msgspec

K = TypeVar("K")


class HistogramFigures(msgspec.Struct):
    """Counts by size, and the sum of all values."""

    counts: list[int]
    sum: float


class TenantCounts(msgspec.Struct):
    """What one tenant has asked for: one API key, or whoever comes to a server without any."""

    running: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Figures(msgspec.Struct):
    """Of one process, or of several together."""

    histograms: dict[str, HistogramFigures]
    finished: dict[str, int]
    """Choices by how they ended."""
    responses: dict[tuple[str, str], int]
    """Answers by route and status."""
    rejections: dict[str, int]
    """Requests that were not admitted, by reason."""
    tenants: dict[str, TenantCounts]
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    tokens_received: int
    """As they come, of requests that go on too."""
    cpu_seconds: float
    last_ttfts: list[float]
    last_gaps: list[float]
    """Seconds to the first token of the last requests, and between the last tokens."""
    num_processes: int = 1
    """How many have given theirs just now."""

    @property
    def num_running(self) -> int:
        """Choices whose clients wait."""
        return sum(counts.running for counts in self.tenants.values())

    def add(self, other: Self) -> None:
        """Another process's on top."""
        for name, histogram in other.histograms.items():
            own = self.histograms[name]
            own.counts = [a + b for a, b in zip(own.counts, histogram.counts, strict=True)]
            own.sum += histogram.sum
        for tenant, counts in other.tenants.items():
            _add_fields(self.tenants.setdefault(tenant, TenantCounts()), counts)
        _add_counts(self.finished, other.finished)
        _add_counts(self.responses, other.responses)
        _add_counts(self.rejections, other.rejections)
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generation_tokens += other.generation_tokens
        self.tokens_received += other.tokens_received
        self.cpu_seconds += other.cpu_seconds
        self.last_ttfts += other.last_ttfts
        self.last_gaps += other.last_gaps
        self.num_processes += other.num_processes

    def end(self) -> None:
        """The process has ended: what it counted stays counted, so that no counter falls; nothing
        of it runs.
        """
        for counts in self.tenants.values():
            counts.running = 0
        self.last_ttfts, self.last_gaps, self.num_processes = [], [], 0


def _add_counts(into: dict[K, int], other: dict[K, int]) -> None:
    for key, count in other.items():
        into[key] = into.get(key, 0) + count


def _add_fields(into: TenantCounts, other: TenantCounts) -> None:
    into.running += other.running
    into.requests += other.requests
    into.prompt_tokens += other.prompt_tokens
    into.generation_tokens += other.generation_tokens
