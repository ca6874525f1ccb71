"""Factories of a step's rows for recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from sidestep.kernels.recurrent.state_rows import FEW_TOKENS, StateRows


def make_rows(
    counts: Sequence[int],
    state_in: Sequence[int],
    state_out: Sequence[int],
    saves: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    device: torch.device | str = "cpu",
    room: int = 0,
    drafts: Mapping[int, int] | None = None,
) -> StateRows:
    """Return the rows that have these numbers of tokens.

    saves: by row, numbers of its tokens and the state rows to write after them. room: long rows
    and their tokens that the step provides for beyond its own. drafts: by row, how many of its last
    tokens are drafts.
    """
    saved = [list((saves or {}).get(row, ())) for row in range(len(counts))]
    flat = [one for own in saved for one in own]
    long = [count for count in counts if count > FEW_TOKENS]

    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StateRows(
        query_starts=int32(list(accumulate(counts, initial=0))),
        state_in=int32(state_in),
        state_out=int32(state_out),
        settled=int32([n - (drafts or {}).get(row, 0) for row, n in enumerate(counts)]),
        save_starts=int32(list(accumulate(map(len, saved), initial=0))),
        save_offsets=int32([offset for offset, _ in flat]),
        save_rows=int32([row for _, row in flat]),
        max_long_tokens=sum(long) + room,
        max_long_rows=len(long) + room,
        max_drafts=max((drafts or {}).values(), default=0),
    )
