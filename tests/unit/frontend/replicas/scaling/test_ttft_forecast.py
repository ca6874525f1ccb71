"""The forecast of the time until a first token."""

from __future__ import annotations

import pytest

from sidestep.frontend.replicas.scaling.ttft_forecast import TtftForecast


def _queue(forecast: TtftForecast, replica: int, handles: range, now: float) -> None:
    for handle in handles:
        forecast.sent(handle, replica, 1000, now)


def test_nothing_is_foreseen_where_nobody_waits() -> None:
    forecast = TtftForecast()
    assert forecast.seconds([0, 1], 5.0) == 0.0
    forecast.sent(1, 0, 1000, 5.0)
    forecast.begun(1, 6.0)
    assert forecast.seconds([0], 7.0) == 0.0


def test_work_over_rate() -> None:
    forecast = TtftForecast()
    _queue(forecast, 0, range(10), 0.0)
    for handle in range(4):
        forecast.begun(handle, handle + 1.0)  # 1000 tokens a second
    assert forecast.seconds([0], 4.0) == pytest.approx(7.0)  # six wait, and the new one


def test_the_best_replica_counts() -> None:
    forecast = TtftForecast()
    _queue(forecast, 0, range(10), 0.0)
    _queue(forecast, 1, range(10, 12), 0.0)
    for handle in (0, 10):
        forecast.begun(handle, 1.0)
    assert forecast.seconds([0, 1], 1.0) == pytest.approx(2.0)
    assert forecast.seconds([0, 1, 2], 1.0) == 0.0


def test_a_queue_that_stands_still_is_seen_by_its_age() -> None:
    forecast = TtftForecast()
    forecast.sent(1, 0, 10, 2.0)
    assert forecast.seconds([0], 9.0) == 7.0


def test_a_rate_falls_where_requests_wait_for_a_slot() -> None:
    forecast = TtftForecast()
    _queue(forecast, 0, range(20), 0.0)
    for handle in range(10):
        forecast.begun(handle, 1.0)
    early = forecast.seconds([0], 1.0)
    assert forecast.seconds([0], 5.0) > 3 * early


def test_what_ends_or_is_lost_is_forgotten() -> None:
    forecast = TtftForecast()
    _queue(forecast, 0, range(3), 0.0)
    forecast.begun(0, 1.0)
    forecast.ended(1, 1.0)
    assert forecast.seconds([0], 1.0) == pytest.approx(2.0)
    forecast.lost(0)
    forecast.begun(2, 2.0)
    forecast.ended(7, 2.0)
    assert forecast.seconds([0], 2.0) == 0.0
