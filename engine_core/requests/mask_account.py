"""Accounts of the time that grammar masks take."""

from __future__ import annotations

from collections.abc import Callable

TOKEN_S = 2e-3
"""Seconds of a processor that a mask may take on average."""
_RECOVERY = 0.1
"""Seconds by which an account recovers in each second of time."""


class MaskAccount:
    """The seconds that masks of a request, or of a grammar, took beyond their allowed average."""

    __slots__ = ("_allowed_s", "_clock", "_name", "_over_s", "_since")

    def __init__(self, name: str, allowed_s: float, clock: Callable[[], float]) -> None:
        """Open an account. name: its owner, for error messages."""
        self._name = name
        self._allowed_s = allowed_s
        self._clock = clock
        self._over_s = 0.0
        self._since = clock()

    def __repr__(self) -> str:
        return f"MaskAccount({self._name}, {self._over_s:.3g} of {self._allowed_s:g} s)"

    def charge(self, seconds: float) -> None:
        """Add the seconds that a mask has taken."""
        self._over_s += seconds - TOKEN_S
        if self._over_s < 0:
            self._over_s = 0.0

    def problem(self) -> str | None:
        """Return why no more masks may be computed; None if they may."""
        if self._over_s <= self._allowed_s:
            return None
        now = self._clock()
        self._over_s = max(0.0, self._over_s - _RECOVERY * (now - self._since))
        self._since = now
        if self._over_s <= self._allowed_s:
            return None
        return (
            "is too expensive to follow: what may come next has taken more than "
            f"{TOKEN_S * 1e3:g} ms of a processor a token, and {self._allowed_s:g} s in all "
            f"beyond that, for {self._name}"
        )
