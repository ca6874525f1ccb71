"""The figures of one streamed choice whose steps give several tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidestep import RequestOutput, RequestOutputKind
from sidestep.frontend.output.outputs import RequestMetrics
from sidestep.frontend.server.observe.metrics import ServerMetrics
from sidestep.frontend.server.service.service import Tally


def tally_of(metrics: ServerMetrics) -> Tally:
    """Return a tally of a streamed choice, without a service around it."""
    service: Any = SimpleNamespace(metrics=metrics)
    choice: Any = SimpleNamespace(params=SimpleNamespace(output_kind=RequestOutputKind.DELTA))
    return Tally(service, choice)


def test_tokens_of_a_run_share_the_time_since_the_one_before() -> None:
    metrics = ServerMetrics()
    tally = tally_of(metrics)
    for at, tokens in ((1.0, 1), (1.25, 2), (2.0, 5), (2.0, 5)):
        times = RequestMetrics(
            arrival_time=0.5,
            first_token_ts=1.0,
            last_token_ts=at,
            num_generation_tokens=tokens,
        )
        tally.note(RequestOutput("r", None, [1], [], False, times))
    gaps = metrics.token_gaps
    assert sum(gaps.counts) == 4, "a gap for each token but the first"
    assert gaps.sum == pytest.approx(1.0), "the time from the first token to the last"
    assert metrics.last_gaps.values() == [0.25, 0.25]
    assert metrics.last_ttfts.values() == [0.5]
