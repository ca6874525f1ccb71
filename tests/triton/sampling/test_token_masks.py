"""Token masks: the kernel, and the reference in torch.

Logits whose bit is 0 become minus infinity, and no others change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.kernels.ops import token_masks
from sidestep.kernels.triton import token_masks_triton
from tests.triton.support import (
    DEVICE,
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
@pytest.mark.parametrize("vocab", [31, 32, 333, 2048, 3001])
@pytest.mark.parametrize("mask_tokens", [token_masks.mask_tokens, token_masks_triton.mask_tokens])
def test_masked_rows(mask_tokens: Callable[..., Any], vocab: int, dtype: torch.dtype) -> None:
    """Check rows that lie apart, as those of a padded vocabulary do."""
    values, size = Values(vocab), -(-vocab // 32)
    memory = poisoned(7, vocab + 5, dtype=dtype)
    logits = memory[:, :vocab].copy_(values.normal(7, vocab, dtype=dtype))
    numbers = values.integers(-(2**31), 2**31, 4 * size)
    numbers[: 2 * size] = [0] * size + [-1] * size  # masks that allow no token, and all tokens
    marks = [1, 0, 3, 0, 0, 4, 2]
    bits = np.unpackbits(np.array(numbers, np.int32).view(np.uint8), bitorder="little").reshape(
        4, -1
    )[:, :vocab]
    expected = memory.clone()
    for row, mark in enumerate(marks):
        if mark:
            expected[row, :vocab][torch.from_numpy(bits[mark - 1] == 0).to(DEVICE)] = -torch.inf
    words, guarded_marks = guarded(int32(numbers).view(4, size)), guarded(int32(marks))
    with unchanged(words=words, marks=guarded_marks):
        mask_tokens(logits, guarded_marks, words)
    assert same(memory, expected)
    assert_margins_untouched(memory)
