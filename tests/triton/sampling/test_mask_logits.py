"""The kernel that masks logits.

Logits that a step's message lists become minus infinity, and no others change.
"""

from __future__ import annotations

import pytest
import torch

from sidestep.kernels.triton.mask_logits_triton import mask_logits
from tests.triton.support import (
    DTYPES,
    Values,
    assert_margins_untouched,
    guarded,
    int32,
    poisoned,
    same,
    unchanged,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 256, 257, 600])
@pytest.mark.parametrize("queries", [1, 3])
def test_listed_logits(count: int, queries: int, dtype: torch.dtype) -> None:
    """Mask the listed tokens of each row's queries, where there are too few tokens before."""
    values, rows, vocab = Values(count), 5, 333
    # Rows may lie further apart than they are long.
    wide = poisoned(rows * queries, vocab + 3, dtype=dtype)
    logits = wide[:, :vocab].copy_(values.normal(rows * queries, vocab, dtype=dtype))
    lens = values.integers(10, 14, rows * queries)
    listed = values.different(count, below=rows * vocab)
    # The list has the first and the last of all logits, and one of them twice.
    listed[:3] = [0, rows * vocab - 1, 0][:count]
    below = [11 + i % 2 * 2 for i in range(count)]
    expected = wide.clone()
    for index, length in zip(listed, below, strict=True):
        for query in range(index // vocab * queries, (index // vocab + 1) * queries):
            if lens[query] < length:
                expected[query, index % vocab] = -torch.inf
    triples = [i // vocab for i in listed] + [i % vocab for i in listed] + below
    message, column = guarded(int32([99] * 11 + triples)), guarded(int32(lens))
    header = guarded(int32([count, 11]))
    with unchanged(message=message, header=header, lens=column):
        mask_logits(logits, message, header, column, queries)
    assert same(wide, expected)
    assert_margins_untouched(wide)
