"""When a device began and ended its steps, on the clock that the machine's processes share."""

from __future__ import annotations

from typing import Any, Protocol

_DRIFT = 50e-6
"""Relative difference in speed that two clocks may have at most."""


class TimedEvent(Protocol):
    """A CUDA event, or its replacement in tests."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this event to a later one."""


class DeviceClock:
    """Start and end times of steps, in order, from the events before and after each step.

    The device measures the time between two events. To place these times on the host's clock, the
    earliest moment is used at which the host ever saw a step's end, counted from that end. The host
    may see an end late, since its threads have other work, but never early.
    """

    def __init__(self) -> None:
        self._last: TimedEvent | None = None
        self._device_ns = 0.0
        """When the last step ended, counted by the device from the first step's end on."""
        self._offset_ns = 0.0
        """From that count to the host's clock."""

    def times(self, started: TimedEvent, done: TimedEvent, seen_ns: int) -> tuple[int, int]:
        """Return the start and the end of the next step, in nanoseconds of the host's clock.

        seen_ns: when the host saw the step's end. Both events, and the last step's second event,
        must have happened and must not have been recorded again.
        """
        busy = started.elapsed_time(done) * 1e6
        if self._last is None:
            self._offset_ns = seen_ns
        else:
            passed = self._last.elapsed_time(started) * 1e6 + busy
            self._device_ns += passed
            self._offset_ns = min(self._offset_ns + passed * _DRIFT, seen_ns - self._device_ns)
        self._last = done
        end = self._device_ns + self._offset_ns
        return int(end - busy), int(end)
