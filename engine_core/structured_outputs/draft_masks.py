"""Masks behind drafts: what a row may sample after each of its drafts, if it accepts them.

The drafts of a row with a grammar come to the core with the output before the step that verifies
them. A row verifies only the drafts that have a mask behind them. So a draft that the grammar
refuses has none, and masks that would take long are left out: they cost the row a few tokens, not
every row its time.

Where a grammar forces the next tokens, they are drafts themselves (jump-ahead decoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.ipc.transport.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor

_FEW = 32
"""Most tokens that a mask allows where the grammar may force the text: each of them is a beginning
of that text."""
MOST_S = 2e-3
"""Seconds of a processor that the masks behind a step's drafts may take, for each thread."""


def cheap_drafts(
    grammars: Sequence[GrammarState], most: Sequence[int], num_threads: int
) -> list[Sequence[int]]:
    """Return the drafts of each grammar's request whose masks are worth their time.

    most: drafts that each request's row may verify. The time of a mask is estimated by the last one
    of the request.
    """
    left = MOST_S * num_threads
    chosen: list[Sequence[int]] = []
    for grammar, number in zip(grammars, most, strict=True):
        drafts = grammar.next_drafts[:number]
        seconds = grammar.mask_s * len(drafts)
        if seconds > left:
            drafts = ()
        else:
            left -= seconds
        chosen.append(drafts)
    return chosen


def masks_behind(
    grammars: Sequence[GrammarState],
    drafts: Sequence[Sequence[int]],
    num_words: int,
    executor: LLExecutor | None,
) -> list[Sequence[Int32]]:
    """Return the masks, [num_words] each, behind the drafts of each grammar's request.

    A draft that cannot be accepted ends them. executor: shares the work among its threads; None to
    compute all here.
    """
    sizes = [1 + len(some) if some else 0 for some in drafts]
    starts = [end - size for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True)]
    # A mask that has been computed has a bit; the library computes none behind a refused draft.
    masks = np.zeros((sum(sizes), num_words), np.int32)
    place, width = masks.ctypes.data, num_words * 4
    jobs = [
        (grammar.matcher, start, list(some))
        for grammar, start, some in zip(grammars, starts, drafts, strict=True)
        if some and grammar.matcher is not None
    ]
    if executor is not None and jobs:
        executor.unsafe_compute_mask_ptr_with_draft_token(jobs, place, width, len(masks))
    else:
        for job in jobs:
            matcher: Any = job[0]  # the library's stubs lack the method
            _, start, some = job
            matcher.unsafe_compute_mask_ptr_with_draft_token(place + start * width, width, some)
    known = [bool(mask.any()) for mask in masks]
    found: list[Sequence[Int32]] = []
    for start, size in zip(starts, sizes, strict=True):
        number = 0
        while number + 1 < size and known[start + number + 1]:
            number += 1
        found.append(list(masks[start + 1 : start + 1 + number]))
    return found


def forced_tokens(
    grammars: Sequence[GrammarState], masks: Sequence[Int32], most: int
) -> list[Int32]:
    """Return the next tokens that each grammar alone decides, at most `most`.

    They are good drafts: the text is certain, and only its division into tokens is not.
    masks: of the next token of each grammar's request.
    """
    found = []
    for grammar, mask in zip(grammars, masks, strict=True):
        tokens: list[int] = []
        matcher = grammar.matcher
        if matcher is not None and np.bitwise_count(mask.view(np.uint32)).sum() <= _FEW:
            tokens = matcher.compute_ff_tokens()
        found.append(np.array(tokens[:most], np.int32))
    return found
