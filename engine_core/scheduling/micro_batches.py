"""Who has a row in a step of a pipeline: its stages work on different steps at a time, so the
requests are spread over as many steps as there are stages.

A request that has sampled can go on when its token has reached the first stage, which is as many
beats later as there are stages. Each beat takes its share of those that decode, not all that it
could: so all stages always have something to do, and requests that came together part. Nobody is
left out for longer than one round of beats, since more than all others would have to be served in
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.engine_core.requests.request import Request

_LEAST_PROMPT = 256
"""Tokens of prompt that a step may have in any case: with fewer, a GPU's products take longer a
token."""


def num_to_compute(request: Request) -> int:
    """Tokens that are known, or on their way, and not computed."""
    return len(request.token_ids) + request.num_placeholders - request.num_computed


def pick_due(live: Sequence[Request], beat: int, num_stages: int) -> Sequence[Request]:
    """Those of the requests that run which may have a row at this beat, in the same order. With a
    single stage: all.
    """
    if num_stages == 1:
        return live
    decoding = sum(not r.parked and num_to_compute(r) == 1 for r in live)
    seats = -(-decoding // num_stages)
    due: list[Request] = []
    for request in live:
        if request.next_beat > beat or request.parked:
            continue
        if num_to_compute(request) == 1:
            if seats == 0:
                continue
            seats -= 1
        due.append(request)
    return due


def share_prompts(most: int, live: Sequence[Request], num_waiting: int, num_stages: int) -> int:
    """How many tokens of prompts a step should have, at most `most`: so that the stages share the
    work of a single long prompt too. num_waiting: tokens of prompts that have not begun. With a
    single stage: `most`.
    """
    if num_stages == 1:
        return most
    begun = sum(count for r in live if (count := num_to_compute(r)) > 1)
    return min(most, max(_LEAST_PROMPT, -(-(begun + num_waiting) // (2 * num_stages))))
