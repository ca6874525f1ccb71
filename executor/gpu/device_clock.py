"""When a device began and ended its steps, on the clock that the machine's processes share."""

from __future__ import annotations

from typing import Any, Protocol

_DRIFT = 50e-6
"""By how much two clocks may differ in speed."""


class TimedEvent(Protocol):
    """A CUDA event, or what tests have in its place."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to a later one."""


class DeviceClock:
    """Steps in order, each by the events before and after it.

    What lies between two events is measured by the device. Where all of it lies on the host's clock
    follows from how soon the host ever saw a step's end: it may see one late, since its threads
    have other work, but never early.
    """

    def __init__(self) -> None:
        self._last: TimedEvent | None = None
        self._device_ns = 0.0
        """When the last step ended, counted by the device from the first step's end on."""
        self._offset_ns = 0.0
        """From that count to the host's clock."""

    def times(self, started: TimedEvent, done: TimedEvent, seen_ns: int) -> tuple[int, int]:
        """Start and end of the next step in host nanoseconds; `seen_ns` is when the host saw its
        end. Both events, and the last step's second one, must have happened and not been recorded
        again.
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
