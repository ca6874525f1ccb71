"""The device's times on the host's clock."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest

from sidestep.executor.gpu.device_clock import DeviceClock

HOUR = 3600 * 10**9


@dataclass
class Event:
    """An event at a time of the device, in nanoseconds."""

    at: float

    def elapsed_time(self, end: Event, /) -> float:
        return (end.at - self.at) / 1e6


def test_a_step_seen_late_does_not_look_idle() -> None:
    """Run steps of 2 ms with 1 ms between; the host's other work delays what it sees."""
    clock, times = DeviceClock(), []
    for i, late in enumerate([0, 5, 0, 30, 7, 0, 12]):
        end = (i + 1) * 3_000_000
        times.append(clock.times(Event(end - 2_000_000), Event(end), end + late * 1_000_000))
    for start, end in times:
        assert end - start == 2_000_000
    for (_, end), (start, _) in pairwise(times):
        assert start - end == pytest.approx(1_000_000, abs=1000)


def test_the_soonest_sight_sets_the_place() -> None:
    """A first step that is seen late shifts its own times, but not those of later ones."""
    clock = DeviceClock()
    assert clock.times(Event(0), Event(1000), 9_000)[1] == 9_000
    assert clock.times(Event(2000), Event(3000), 3_100)[1] == 3_100
    assert clock.times(Event(3000), Event(4000), 7_000)[1] == 4_100


@pytest.mark.parametrize("speed", [1 - 3e-5, 1, 1 + 3e-5])
def test_clocks_of_different_speed(speed: float) -> None:
    """After hours the times still equal those that the host saw."""
    clock = DeviceClock()
    for i in range(1, 10_000):
        host = i * HOUR // 1000
        start, end = clock.times(
            Event((host - 1_000_000) * speed), Event(host * speed), host + (i % 7) * 1000
        )
        assert abs(end - host) < 30e-6 * 8 * HOUR / 1000 + 10_000
        assert end - start == pytest.approx(1_000_000, rel=1e-3)
