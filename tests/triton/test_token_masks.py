"""Logits whose bit is 0 become minus infinity, and no others change: the kernel, and the reference in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.kernels import token_masks, token_masks_triton
from tests.triton.support import DEVICE, Values, assert_margins_untouched, guarded, int32, poisoned, same, unchanged


@pytest.mark.parametrize("vocab", [31, 32, 333, 2048, 3001])
@pytest.mark.parametrize("mask_tokens", [token_masks.mask_tokens, token_masks_triton.mask_tokens])
def test_masked_rows(mask_tokens: Callable[..., Any], vocab: int) -> None:
    values, size = Values(vocab), -(-vocab // 32)
    logits = poisoned(7, vocab, dtype=torch.float32).copy_(values.normal(7, vocab, dtype=torch.float32))
    numbers = values.integers(-2**31, 2**31, 4 * size)
    numbers[:2 * size] = [0] * size + [-1] * size  # nothing, and everything
    rows, masks = [5, 0, 6, 2], [3, 0, 1, 2]
    bits = np.unpackbits(np.array(numbers, np.int32).view(np.uint8), bitorder="little").reshape(4, -1)[:, :vocab]
    expected = logits.clone()
    for row, mask in zip(rows, masks, strict=True):
        expected[row, torch.from_numpy(bits[mask] == 0).to(DEVICE)] = -torch.inf
    words = guarded(int32(numbers).view(4, size))
    places = [torch.tensor(x, device=DEVICE) for x in (rows, masks)]
    with unchanged(words=words):
        mask_tokens(logits, *places, words)
    assert same(logits, expected)
    assert_margins_untouched(logits)
