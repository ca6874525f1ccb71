"""Tokens that must not be sampled.

They are tokens that a request does not allow, and the last tokens of bad words.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)
from sidestep.ipc.params.logits_controls import MAX_BAD_WORD_TOKENS

_BEFORE = MAX_BAD_WORD_TOKENS - 1
"""Tokens that a bad word may have before its last."""
_ANY, _NONE = -1, -2
"""Instead of a token id: any token matches, and no token matches."""


class AllowedTokens(LogitsProcessor):
    """Sets the logits of all tokens that are not allowed to minus infinity."""

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._left_out: dict[int, Tensor] = {}
        """By slot, a bool for each token: of bounded size, however many are allowed."""

    def enter(self, request: EnteringRequest) -> bool:
        """Copy the request's mask to the device."""
        allowed = request.controls.allowed_token_ids
        if not allowed:
            return False
        left_out = np.ones(self.setup.vocab_size, np.bool_)
        left_out[allowed] = False
        self._left_out[request.slot] = to_device(left_out, self.setup.device)
        return True

    def leave(self, slot: int) -> None:
        """Forget the mask of a slot."""
        del self._left_out[slot]

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Mask the logits."""
        logits.masked_fill_(torch.stack([self._left_out[slot] for slot in slots]), -torch.inf)


class BadWords(LogitsProcessor):
    """Forbids tokens that would complete a bad word.

    It keeps the last output tokens of each slot on the device, and compares them with the
    beginnings of bad words.
    """

    handles_drafts = True

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._recent = torch.full(
            (setup.num_slots, _BEFORE), _NONE, dtype=torch.int64, device=setup.device
        )
        self._words: dict[int, tuple[Tensor, Tensor]] = {}
        """By slot: beginnings [words, _BEFORE], _ANY where a word is shorter; and last tokens
        [words]."""

    def enter(self, request: EnteringRequest) -> bool:
        """Copy the request's words and its last output tokens to the device."""
        words = request.controls.bad_words
        if not words:
            return False
        device = self.setup.device
        beginnings = np.full((len(words), _BEFORE), _ANY, np.int64)
        for row, word in zip(beginnings, words, strict=True):
            row[_BEFORE - len(word) + 1 :] = word[:-1]
        last = np.array([word[-1] for word in words], np.int64)
        self._words[request.slot] = (to_device(beginnings, device), to_device(last, device))
        recent = np.full(_BEFORE, _NONE, np.int64)
        known = request.output_token_ids[-_BEFORE:]
        recent[_BEFORE - len(known) :] = known
        self._recent[request.slot] = to_device(recent, device)
        return True

    def leave(self, slot: int) -> None:
        """Forget the words of a slot."""
        del self._words[slot]

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Mask the last tokens of words whose beginnings stand at the end of the output."""
        device = self.setup.device
        words = [self._words[slot] for slot in slots]
        rows = np.repeat(np.arange(len(slots)), [len(last) for _, last in words])
        index = to_device(rows, device)
        recent = self._recent.index_select(0, slots.on_device.index_select(0, index))
        beginnings, last = (torch.cat(columns) for columns in zip(*words, strict=True))
        begun = ((recent == beginnings) | (beginnings == _ANY)).all(1)
        # Added, not written: several words may end in one token.
        masks = torch.where(begun, -torch.inf, 0.0)
        logits.index_put_((index, last), masks, accumulate=True)

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:
        """Append the sampled tokens to the last output tokens."""
        recent, new = self._recent.index_select(0, slots.on_device), token_ids[:, None]
        longer = torch.cat((recent[:, 1:], new), 1)
        self._recent.index_copy_(0, slots.on_device, torch.where(new >= 0, longer, recent))
