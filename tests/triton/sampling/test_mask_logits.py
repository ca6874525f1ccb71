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
def test_listed_logits(count: int, dtype: torch.dtype) -> None:
    values, rows, vocab = Values(count), 5, 333
    wide = poisoned(rows, vocab + 3, dtype=dtype)  # rows may lie further apart than they are long
    logits = wide[:, :vocab].copy_(values.normal(rows, vocab, dtype=dtype))
    listed = values.different(count, below=rows * vocab)
    # The list has the first and the last of all logits, and one of them twice.
    listed[:3] = [0, rows * vocab - 1, 0][:count]
    expected = wide.clone()
    for index in listed:
        expected[index // vocab, index % vocab] = -torch.inf
    message = guarded(int32([99] * 11 + [i // vocab for i in listed] + [i % vocab for i in listed]))
    header = guarded(int32([count, 11]))
    with unchanged(message=message, header=header):
        mask_logits(logits, message, header)
    assert same(wide, expected)
    assert_margins_untouched(wide)
