"""What rows with a grammar may sample: the core sends it while the model computes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.logits_processor import EnteringRequest, LogitsProcessor, ProcessorSetup, Slots
from sidestep.executor.transfer import to_device
from sidestep.ipc.step import StepInput, StepMasks
from sidestep.kernels.token_masks import mask_tokens


def launch_masks(vocab_size: int, device: torch.device) -> None:
    """Launches what steps with masks launch, for it to be compiled."""
    place = torch.zeros(1, dtype=torch.int64, device=device)
    words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
    mask_tokens(torch.zeros(1, vocab_size, device=device), place, place, words)


class GrammarMasks(LogitsProcessor):
    """Comes last, so that nothing brings back what the grammar forbids."""

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        self._words = torch.empty(0, dtype=torch.int32)
        self._place_of: dict[int, int] = {}
        """Slot -> its row in `_words`."""

    def enter(self, request: EnteringRequest) -> bool:
        return request.controls.has_grammar

    def take(self, step: StepInput, masks: StepMasks) -> None:
        """The masks of the step that is to be sampled, in one copy to the device."""
        assert masks.step_id == step.step_id, f"masks of step {masks.step_id} came for step {step.step_id}"
        self._place_of = {slot: place for place, slot in enumerate(step.slots[masks.rows].tolist())}
        if self._place_of:
            words = torch.empty(len(masks.rows), len(masks.words) // len(masks.rows), dtype=torch.int32,
                                pin_memory=self.setup.device.type == "cuda")
            words.numpy().reshape(-1)[:] = masks.words
            self._words = words.to(self.setup.device, non_blocking=True)

    def apply(self, logits: Tensor, slots: Slots) -> None:
        # A row without a mask is of a request that has ended: its token will be dropped.
        masked = [(row, place) for row, slot in enumerate(slots) if (place := self._place_of.get(slot)) is not None]
        if masked:
            rows, places = to_device(np.array(masked, np.int64).T, self.setup.device)
            mask_tokens(logits, rows, places, self._words)
