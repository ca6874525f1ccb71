"""Device tables with seeded contents between guarded margins, for the kernels of speculation."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sidestep.kernels.ops.speculation import DraftTables
from tests.triton.support import assert_margins_untouched, bits, int32, poisoned


@dataclass(frozen=True)
class Sizes:
    """Sizes of tables: slots, most drafts, tokens of the longest request."""

    slots: int
    limit: int
    longest: int


def spaced(rows: list[list[int]]) -> Tensor:
    """Return a table whose rows lie further apart than they are long."""
    width = len(rows[0])
    table = poisoned(len(rows), width + 3, dtype=torch.int32)[:, :width]
    return table.copy_(int32(rows))


def column(values: list[int]) -> Tensor:
    return poisoned(len(values), dtype=torch.int32).copy_(int32(values))


def random_tables(sizes: Sizes, letters: int, chance: random.Random) -> DraftTables:
    """Return tables of requests with few different tokens, so that drafts are often right."""
    slots, limit, longest = range(sizes.slots), sizes.limit, sizes.longest

    def tokens(count: int) -> list[int]:
        return [chance.randrange(letters) for _ in range(count)]

    return DraftTables(
        last_sampled=column(tokens(sizes.slots)),
        num_computed=column([chance.randrange(longest) for _ in slots]),
        drafts=spaced([tokens(limit) for _ in slots]),
        num_drafts=column([chance.randint(0, limit) for _ in slots]),
        tokens=spaced([tokens(longest) for _ in slots]),
        draft_limit=column([chance.choice([0, limit, chance.randint(0, limit)]) for _ in slots]),
        max_total=column([chance.randint(1, longest) for _ in slots]),
    )


def copied(tables: DraftTables) -> DraftTables:
    """Return tables for the reference, with the same contents."""
    return DraftTables(*(getattr(tables, f.name).clone() for f in fields(tables)))


def assert_equal_tables(tables: DraftTables, expected: DraftTables) -> None:
    """Check all entries and the memory around them."""
    for field in fields(tables):
        table = getattr(tables, field.name)
        assert table.tolist() == getattr(expected, field.name).tolist(), field.name
        if table.is_contiguous():
            assert_margins_untouched(table)
        else:
            whole = torch.empty(0, dtype=torch.int32, device=table.device).set_(
                table.untyped_storage()
            )
            gaps = table.as_strided(
                (table.shape[0] - 1, 3), table.stride(), table.storage_offset() + table.shape[1]
            )
            assert bool((bits(gaps) == bits(whole[:1])).all()), f"wrote between {field.name}"
