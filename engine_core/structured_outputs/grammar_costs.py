"""Bounds on the time of grammar masks: for a step, for a request with all its choices, and for a
grammar.

A mask of most grammars takes some 10 us, one of an ambiguous grammar up to some 10 ms, and taking a
token takes up to as long as a mask. So a step gets only as many rows as keep the time of their last
masks within a bound. A request or a grammar whose masks took too long altogether ends with an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sidestep.engine_core.requests.request import Request

TOKEN_S = 2e-3
"""Seconds of a processor that a mask may take on average."""
COUNTED_S = TOKEN_S / 8
"""Seconds. Masks that take less are not charged: charging would take longer than some of them."""
REQUEST_S = 5.0
"""Seconds beyond that average which a request may take, for all of its choices together."""
GRAMMAR_S = 20.0
"""Seconds beyond that average which a grammar may take, for all requests together."""
_RECOVERY = 0.1
"""Seconds by which an account recovers in each second of time."""
_NOBODY: frozenset[Request] = frozenset()


class MaskAccount:
    """The seconds that the masks of a request, or of a grammar, have taken beyond the average that
    they may take."""

    __slots__ = ("_allowed_s", "_clock", "_name", "_over_s", "_since")

    def __init__(self, name: str, allowed_s: float, clock: Callable[[], float]) -> None:
        """name: the owner of the account, for error messages."""
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
            f"is too expensive to follow: what may come next has taken more than {TOKEN_S * 1e3:g} ms of a "
            f"processor a token, and {self._allowed_s:g} s in all beyond that, for {self._name}"
        )


def share_masks(due: Sequence[Request], budget_s: float) -> Collection[Request]:
    """Return the requests that this step leaves out, because their masks take too long. The masks
    of the other requests in `due` take at most `budget_s` seconds of processors, estimated from the
    last mask of each. Requests with cheap masks get their rows first. Among the expensive ones, at
    least the request that has been left out most often gets its row."""
    held = [request for request in due if request.matcher is not None]
    left = budget_s - sum(request.mask_s for request in held)
    if left >= 0:
        return _NOBODY
    held.sort(key=lambda request: -request.mask_s)
    out = list[Request]()
    for request in held:
        if left >= 0:
            break
        left += request.mask_s
        out.append(request)
    out.remove(max(out, key=lambda request: request.num_left_out))
    for request in out:
        request.num_left_out += 1
    return set(out)
