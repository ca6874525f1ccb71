"""The report of a load: latencies as their receivers saw them, throughput and goodput.

It also has the figures of host and device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Report = dict[str, float | str]
PERCENTILES = (50, 90, 99)
MOST_REASONS = 3
"""Number of the most frequent reasons of failures that a report shows."""
GOALS = ("ttft", "tpot", "itl", "e2e")
"""Latencies that a goal may limit."""


DRAFT_COUNTS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
"""Statistics of an engine with speculation: rows that verified drafts, drafts, accepted drafts."""


@dataclass(slots=True)
class Sample:
    """One request as its receiver saw it, in seconds of one monotonic clock."""

    planned: float
    """Time at which it was to be sent."""
    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Time of each output that brought tokens."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_retries: int = 0
    """Number of times that it was sent again, as the server had no room."""
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """Seconds from sending to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one; None with one token."""
        return (
            (self.e2e - self.ttft) / (self.num_output_tokens - 1)
            if self.num_output_tokens > 1
            else None
        )

    @property
    def itl(self) -> list[float]:
        """Seconds between one output and the next."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def meets(sample: Sample, goals: dict[str, float]) -> bool:
    """Return whether a request kept to goals in milliseconds: ttft, tpot, e2e and itl.

    The slowest gap counts for itl.
    """
    if sample.error is not None:
        return False
    slowest = {
        "ttft": sample.ttft,
        "e2e": sample.e2e,
        "tpot": sample.tpot or 0.0,
        "itl": max(sample.itl, default=0.0),
    }
    return all(slowest[name] * 1e3 <= limit for name, limit in goals.items())


def make_report(samples: Sequence[Sample], begin: float, goals: dict[str, float]) -> Report:
    """Return the figures of a load that began at `begin`."""
    done = [s for s in samples if s.error is None]
    report: Report = {"requests": len(samples), "failed": len(samples) - len(done)}
    if len(done) < len(samples):
        reasons = Counter(s.error for s in samples if s.error is not None)
        report["failures"] = "; ".join(
            f"{count} x {reason}" for reason, count in reasons.most_common(MOST_REASONS)
        )
    if retries := sum(s.num_retries for s in samples):
        report["retries"] = retries
    if not done:
        return report
    end = max(s.arrivals[-1] for s in done)
    seconds, tokens = end - begin, sum(s.num_output_tokens for s in done)
    report |= {
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "total_tokens_per_s": (tokens + sum(s.num_input_tokens for s in done)) / seconds,
        # How far the load itself fell behind its plan, and how long the last request took after it
        # was sent.
        "send_lag_ms_p99": percentile([s.sent - s.planned for s in samples], 99) * 1e3,
        "drain_s": end - max(s.sent for s in done),
    }
    latencies = {
        "ttft": [s.ttft for s in done],
        "itl": [gap for s in done for gap in s.itl],
        "tpot": [s.tpot for s in done if s.tpot is not None],
        "e2e": [s.e2e for s in done],
    }
    for name, values in latencies.items():
        if values:
            report[f"{name}_ms_mean"] = sum(values) / len(values) * 1e3
            report |= {f"{name}_ms_p{q}": percentile(values, q) * 1e3 for q in PERCENTILES}
    if goals:
        good = sum(meets(s, goals) for s in samples)
        report |= {"goodput_share": good / len(samples), "goodput_requests_per_s": good / seconds}
    return report


def speculation(after: Mapping[str, float], before: Mapping[str, float]) -> Report:
    """Return the drafts of the time between two readings of an engine's statistics.

    The acceptance length is the mean number of tokens of a row that verified drafts. The report is
    empty if the engine has no speculation, or does not tell.
    """
    if any(name not in reading for name in DRAFT_COUNTS for reading in (after, before)):
        return {}
    rows, drafted, accepted = (after[name] - before[name] for name in DRAFT_COUNTS)
    return {
        **({"acceptance_length": 1 + accepted / rows} if rows else {}),
        "draft_tokens": int(drafted),
        "accepted_draft_tokens": int(accepted),
    }


def percentile(values: Sequence[float], q: int) -> float:
    """Return the percentile `q` of the values, by nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, q * len(ordered) // 100)]
