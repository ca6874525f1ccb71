"""Bounds on the time of grammar masks: for a step, for a request and for a grammar.

A request's bound is for all its choices together. A mask of most grammars takes some 10 us, one of
an ambiguous grammar up to some 10 ms, and taking a token takes up to as long as a mask. So a step
gets only as many rows as keep the time of their last masks within a bound. A request or a grammar
whose masks took too long altogether ends with an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.mask_account import TOKEN_S
from sidestep.engine_core.requests.request import Request

COUNTED_S = TOKEN_S / 8
"""Seconds. Masks that take less are not charged: charging would take longer than some of them."""
REQUEST_S = 5.0
"""Seconds beyond the average TOKEN_S that a request may take, for all of its choices together."""
GRAMMAR_S = 20.0
"""Seconds beyond the average TOKEN_S that a grammar may take, for all requests together."""
_NOBODY: frozenset[Request] = frozenset()


def share_masks(due: Sequence[Request], budget_s: float) -> Collection[Request]:
    """Return the requests that this step leaves out, because their masks take too long.

    The masks of the other requests in `due` take at most `budget_s` seconds of processors,
    estimated from the last mask of each. Requests with cheap masks get their rows first. Among the
    expensive ones, at least the request that has been left out most often gets its row.
    """
    held = [(request, request.grammar) for request in due if request.grammar is not None]
    left = budget_s - sum(grammar.mask_s for _, grammar in held)
    if left >= 0:
        return _NOBODY
    held.sort(key=lambda one: -one[1].mask_s)
    out = list[tuple[Request, GrammarState]]()
    for request, grammar in held:
        if left >= 0:
            break
        left += grammar.mask_s
        out.append((request, grammar))
    out.remove(max(out, key=lambda one: one[1].num_left_out))
    for _, grammar in out:
        grammar.leave_out()
    return {request for request, _ in out}
