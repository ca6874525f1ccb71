"""Choose the requests that get a row in a pipeline's step.

The stages of a pipeline work on different steps at a time, so the requests are spread over as many
steps as there are stages. A request that has sampled can go on when its token has reached the first
stage, which is `num_stages` beats later. Each beat takes its share of the decoding requests, not
all that it could: so all stages always have work, and requests that came together are spread out.
No request is left out for longer than one round of beats, since more requests than all others would
have to be served in that round.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.engine_core.requests.request import Request

_LEAST_PROMPT = 256
"""Tokens of prompt that a step may have in any case.

With fewer tokens, a GPU's matrix products take longer a token.
"""


def pick_due(live: Sequence[Request], beat: int, num_stages: int) -> Sequence[Request]:
    """Return the running requests that may have a row at this beat, in the same order.

    With a single stage, return all.
    """
    if num_stages == 1:
        return live
    decoding = sum(not r.parked and r.num_to_compute == 1 for r in live)
    seats = -(-decoding // num_stages)
    due: list[Request] = []
    for request in live:
        if request.next_beat > beat or request.parked:
            continue
        if request.num_to_compute == 1:
            if seats == 0:
                continue
            seats -= 1
        due.append(request)
    return due


def share_prompts(most: int, live: Sequence[Request], num_waiting: int, num_stages: int) -> int:
    """Return how many tokens of prompts a step should have, at most `most`.

    The stages thereby share the work of a single long prompt too. With a single stage, return
    `most`. num_waiting: tokens of prompts that have not begun.
    """
    if num_stages == 1:
        return most
    begun = sum(count for r in live if (count := r.num_to_compute) > 1)
    return min(most, max(_LEAST_PROMPT, -(-(begun + num_waiting) // (2 * num_stages))))
