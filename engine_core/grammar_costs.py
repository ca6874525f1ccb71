"""What masks may cost: a step, a request with all its choices, and a grammar.

A mask of most grammars takes some 10 us, one of an ambiguous grammar up to some 10 ms, and to take a token takes up to
as long. So a step has no more rows than whose masks took a bounded time before; and a request or a grammar whose masks
took too long altogether ends with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from sidestep.engine_core.request import Request

TOKEN_S = 2e-3
"""Seconds of a processor that a mask may take on average."""
COUNTED_S = TOKEN_S / 8
"""Cheaper masks are not counted, which would take longer than some of them."""
REQUEST_S = 5.0
"""Seconds beyond that which a request may take, all of its choices together."""
GRAMMAR_S = 20.0
"""Seconds beyond that which a grammar may take, all requests together."""
_RECOVERY = 0.1
"""Seconds that a second of time brings back."""
_NOBODY: frozenset[Request] = frozenset()


class MaskAccount:
    """What the masks of a request, or of a grammar, have taken beyond what they may take on average."""

    __slots__ = ("_allowed_s", "_clock", "_name", "_over_s", "_since")

    def __init__(self, name: str, allowed_s: float, clock: Callable[[], float]) -> None:
        """name: whose it is, for people."""
        self._name = name
        self._allowed_s = allowed_s
        self._clock = clock
        self._over_s = 0.0
        self._since = clock()

    def __repr__(self) -> str:
        return f"MaskAccount({self._name}, {self._over_s:.3g} of {self._allowed_s:g} s)"

    def charge(self, seconds: float) -> None:
        """A mask has taken so long."""
        self._over_s += seconds - TOKEN_S
        if self._over_s < 0:
            self._over_s = 0.0

    def problem(self) -> str | None:
        """Why no more masks may be computed, if so."""
        if self._over_s <= self._allowed_s:
            return None
        now = self._clock()
        self._over_s = max(0.0, self._over_s - _RECOVERY * (now - self._since))
        self._since = now
        if self._over_s <= self._allowed_s:
            return None
        return (f"is too expensive to follow: what may come next has taken more than {TOKEN_S * 1e3:g} ms of a "
                f"processor a token, and {self._allowed_s:g} s in all beyond that, for {self._name}")


def share_masks(due: Sequence[Request], budget_s: float) -> Collection[Request]:
    """Those of the requests due for a row whose grammars leave them out of this step: so that the masks of the others
    take no more than these seconds of processors, judged by the last mask of each. Cheap ones come first; of the others
    at least the one that has been left out most often gets its row."""
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
