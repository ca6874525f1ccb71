"""When a replica joins and when one leaves, for loads over time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidestep.frontend.replicas.scaling.scaler import Load, ScaleLimits, Scaler

LIMITS = ScaleLimits(least=1, most=3, target_s=1.0, calm_s=60.0)
IDLE = Load(forecast_s=0.0, running=0, places=8)
BUSY = Load(forecast_s=5.0, running=30, places=8)


def _decisions(scaler: Scaler, load: Load, num_serving: int, times: range) -> list[int]:
    return [scaler.decide(load, num_serving, float(now)) for now in times]


def test_a_replica_joins_when_waits_stay_too_long() -> None:
    assert _decisions(Scaler(LIMITS), BUSY, 1, range(3)) == [0, 0, 1]


def test_one_long_wait_alone_changes_nothing() -> None:
    scaler = Scaler(LIMITS)
    for now in range(0, 20, 2):
        assert scaler.decide(BUSY, 1, now) == 0
        assert scaler.decide(IDLE, 1, now + 1) == 0


def test_the_next_decision_begins_anew() -> None:
    scaler = Scaler(LIMITS)
    assert _decisions(scaler, BUSY, 1, range(3)) == [0, 0, 1]
    assert _decisions(scaler, BUSY, 2, range(8, 11)) == [0, 0, 1]


def test_a_replica_leaves_after_a_calm_time() -> None:
    decisions = _decisions(Scaler(LIMITS), IDLE, 2, range(61))
    assert decisions == [0] * 60 + [-1]


def test_running_requests_keep_the_replicas_that_they_need() -> None:
    needed = IDLE._replace(running=12)  # more than 0.7 of the places of two replicas
    assert not any(_decisions(Scaler(LIMITS), needed, 3, range(200)))
    assert _decisions(Scaler(LIMITS), IDLE._replace(running=11), 3, range(61))[-1] == -1


def test_too_few_replicas_are_filled_up_at_once() -> None:
    assert Scaler(LIMITS._replace(least=2)).decide(IDLE, 1, 0.0) == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 64), st.floats(0.1, 30)), min_size=1, max_size=80
    )
)
def test_the_number_stays_within_its_limits(loads: list[tuple[float, int, float]]) -> None:
    scaler, num_serving, now = Scaler(LIMITS), 1, 0.0
    for forecast_s, running, later in loads:
        now += later
        num_serving += scaler.decide(Load(forecast_s, running, 8), num_serving, now)
        assert LIMITS.least <= num_serving <= LIMITS.most
