"""The messages that let another replica continue the requests of one that has died."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sidestep.ipc.transport.messages import AddRequest, pack_ids


def continued(
    message: AddRequest, tokens: Mapping[int, list[int]]
) -> list[tuple[AddRequest, set[int]]]:
    """Return the messages that let another replica continue a request, and the handles of each.

    tokens: the output so far of those of the request's choices that have not ended, by handle.

    A beam search has no output before its end, so it starts again. Choices that all have no output
    yet share the computation of their prompt again. Otherwise each choice continues by itself, with
    the seed that it has.
    """
    whole = message.beam_search is not None or (
        len(tokens) == message.sampling.n and not any(tokens.values())
    )
    if not tokens:
        return []
    if whole:
        return [(message, set(tokens))]
    return [(_alone(message, handle, ids), {handle}) for handle, ids in tokens.items()]


def _alone(message: AddRequest, handle: int, tokens: list[int]) -> AddRequest:
    """Return the message that continues one choice of a request, with its output so far."""
    index, output = handle - message.handle, pack_ids(tokens)
    if message.sampling.n == 1:
        return msgspec.structs.replace(message, output_token_ids=output)
    return msgspec.structs.replace(
        message,
        handle=handle,
        request_id=f"{message.request_id}/{index}",
        output_token_ids=output,
        sampling=message.sampling.for_choice(index),
    )
