"""Rows whose requests ask for more than every row has: left out when a step's plain rows are
sampled, and sampled after those, on a float32 copy of their logits.

So plain rows pay nothing, and see nothing; a captured step stays one graph; penalties are not
rounded to the model's type; and the model's own logits are still there when a row has been sampled.
`before_sampling` and `after_sampling` are called only in steps that have such rows.

A row that a grammar holds, and that asks for nothing else, is not one of them: its logits are
masked in place, and it is sampled as plain rows are, but later, when the masks have come.

Order of side effects: `enter` comes with the step that brings a request, before the step's rows are
looked for. State that depends on sampled tokens lives on the device and advances in
`after_sampling`, in the order of the steps, so that it is complete with steps in flight too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.logit_bias import LogitBias
from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)
from sidestep.executor.sampling.penalties import Penalties
from sidestep.executor.sampling.prompt_logprobs import PromptTokens, find_prompt_tokens
from sidestep.executor.sampling.token_logprobs import Logprobs, logprobs_of, make_logprobs
from sidestep.executor.sampling.token_masks import AllowedTokens, BadWords
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import StepLimits
from sidestep.ipc.params.logits_controls import decode_controls
from sidestep.ipc.transport.step import Int32, Int64, StepInput

MOST_ROWS = 64
"""Rows that are copied to float32 at a time: what bounds the memory."""


class Share(NamedTuple):
    """The rows of a SpecialBatch that one processor has accepted."""

    processor: LogitsProcessor
    places: Tensor | None
    """int64 on the device: their places in the batch; None for all."""
    slots: Slots


@dataclass(frozen=True, kw_only=True)
class SpecialBatch:
    """Some special rows that sample in a step; n of them, at most MOST_ROWS."""

    first: int
    """How many special rows of the step come before these; a multiple of MOST_ROWS."""
    rows: Int64
    """[n] Among the rows of the step."""
    samples: Int64
    """[n] Among the rows that sample."""
    slots: Int32
    """[n]"""
    seq_lens: Int32
    """[n] Tokens before the one that is sampled, which is its position."""
    places: Tensor
    """int64 [n] on the device: among the rows of the step's logits."""
    slot_index: Tensor
    """int64 [n] on the device: `slots`."""
    shares: Sequence[Share] = ()
    """What concerns each processor."""


Sample = Callable[[Tensor, SpecialBatch], Tensor]
"""Samples from logits float32 [n, V], which it may change; returns int64 [n], after it has set
`last_sampled`."""


def make_special_rows(args: WorkerArgs, limits: StepLimits, device: torch.device) -> SpecialRows:
    """With everything that changes logits, in its order. Raises EngineStartError for a class of the
    user's that cannot be made.
    """
    setup = ProcessorSetup(
        device=device, vocab_size=args.spec.vocab_size, num_slots=limits.num_slots
    )
    own = [make_processor(target, setup) for target in args.model.logits_processors or ()]
    processors = [AllowedTokens(setup), BadWords(setup), LogitBias(setup), *own, Penalties(setup)]
    return SpecialRows(processors, GrammarMasks(setup, limits.num_masks), limits.num_slots, device)


def make_processor(target: str, setup: ProcessorSetup) -> LogitsProcessor:
    """An instance of the class that 'module:Class' names."""
    try:
        processor = registry.load(target)(setup)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise EngineStartError(f"logits_processors: {target} cannot be made: {problem}") from error
    if not isinstance(processor, LogitsProcessor):
        raise EngineStartError(f"logits_processors: {target} is not a LogitsProcessor")
    return processor


class SpecialRows:
    """Knows which slots hold such requests, and what is to be done for them."""

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        masks: GrammarMasks,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """processors: in the order in which they change logits; masks: after them, given what rows
        with a grammar may sample before any of these is sampled.
        """
        self._processors = [*processors, masks]
        self.masks = masks
        self._device = device
        self._accepted = np.zeros((len(self._processors), num_slots), np.bool_)
        self._known = np.zeros(num_slots, np.bool_)
        """Slots of requests with controls; of them, those whose rows are special, and those that
        wait for masks alone.
        """
        self._special = np.zeros(num_slots, np.bool_)
        self._masked = np.zeros(num_slots, np.bool_)
        self._num_logprobs = np.full(num_slots, -1, np.int32)
        self._num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        self._count = 0

    def __repr__(self) -> str:
        return f"SpecialRows(slots {np.flatnonzero(self._known).tolist()})"

    def enter(self, step: StepInput) -> None:
        """Takes in the requests of a step, and forgets those that had their slots before."""
        if not (self._count or len(step.new_controls)):
            return
        prompts = step.new_num_prompt.tolist()
        for entering, num_prompt in zip(step.entering_rows(), prompts, strict=True):
            slot, _, sent, _, controls = entering
            self._leave(slot)
            if controls.start < controls.stop:
                tokens = step.new_token_ids[sent].copy()
                self._enter(
                    EnteringRequest(
                        slot=slot,
                        controls=decode_controls(step.new_controls[controls].tobytes()),
                        prompt_token_ids=tokens[:num_prompt],
                        output_token_ids=tokens[num_prompt:],
                    )
                )
        self._count = int(self._known.sum())

    def find(self, batch: HostBatch) -> Apart | None:
        """Rows that sample in this step, but are no plain ones; None if there is none."""
        if not self._count or not self._known[batch.slots].any():
            return None
        special, masked = (
            np.flatnonzero(kind[batch.slots] & batch.samples)
            for kind in (self._special, self._masked)
        )
        return Apart(special, masked) if len(special) or len(masked) else None

    def find_prompts(self, batch: HostBatch) -> PromptTokens | None:
        """Prompts' tokens in this step whose logits tell of the token after them, if that is asked
        for.
        """
        if not self._count:
            return None
        return find_prompt_tokens(batch, self._num_prompt_logprobs)

    def run(
        self, logits: Tensor, batch: HostBatch, rows: Int64, places: Int64, sample: Sample
    ) -> list[Logprobs]:
        """Samples these rows of a step, whose logits [R, V], of any type, lie at `places`; returns
        what they ask to know.
        """
        logprobs = []
        for part in self._parts(batch, rows, places):
            wide = logits.index_select(0, part.places).float()
            self.before_sampling(wide, part)
            tokens = sample(wide, part)
            found = self.after_sampling(logits, tokens, part)
            if found is not None:
                logprobs.append(found)
        return logprobs

    def before_sampling(self, wide: Tensor, part: SpecialBatch) -> None:
        """Changes logits, float32 [n, V], in place."""
        for processor, index, slots in part.shares:
            if index is None:
                processor.apply(wide, slots)
                continue
            own = wide.index_select(0, index)
            processor.apply(own, slots)
            wide.index_copy_(0, index, own)

    def after_sampling(
        self, logits: Tensor, token_ids: Tensor, part: SpecialBatch
    ) -> Logprobs | None:
        """token_ids int64 [n]; logits [R, V] as the model gave them, part.places telling which rows
        are meant.
        """
        for processor, index, slots in part.shares:
            processor.sampled(
                token_ids if index is None else token_ids.index_select(0, index), slots
            )
        numbers = self._num_logprobs[part.slots]
        asking = np.flatnonzero(numbers >= 0)
        if not len(asking):
            return None
        places, numbers = part.places, numbers[asking]
        if len(asking) < len(part.slots):
            index = to_device(asking, self._device)
            places, token_ids = places.index_select(0, index), token_ids.index_select(0, index)
        packed = logprobs_of(logits.index_select(0, places), token_ids, int(numbers.max()))
        return make_logprobs(
            packed, part.samples[asking], part.seq_lens[asking].astype(np.int64), numbers
        )

    def _enter(self, request: EnteringRequest) -> None:
        slot = request.slot
        self._known[slot] = True
        self._num_logprobs[slot] = request.controls.logprobs
        self._num_prompt_logprobs[slot] = request.controls.prompt_logprobs
        for processor, accepted in zip(self._processors, self._accepted, strict=True):
            accepted[slot] = not request.controls.is_beam and processor.enter(request)
        self._special[slot] = self._accepted[:-1, slot].any() or self._num_logprobs[slot] >= 0
        self._masked[slot] = self._accepted[-1, slot] and not self._special[slot]

    def _leave(self, slot: int) -> None:
        if not self._known[slot]:
            return
        self._known[slot] = self._special[slot] = self._masked[slot] = False
        self._num_logprobs[slot] = self._num_prompt_logprobs[slot] = -1
        for processor, accepted in zip(self._processors, self._accepted, strict=True):
            if accepted[slot]:
                accepted[slot] = False
                processor.leave(slot)

    def _parts(self, batch: HostBatch, rows: Int64, places: Int64) -> Iterator[SpecialBatch]:
        for first in range(0, len(rows), MOST_ROWS):
            some = rows[first : first + MOST_ROWS]
            slots = batch.slots[some]
            place_index, slot_index = to_device(
                np.stack((places[first : first + MOST_ROWS], slots.astype(np.int64))), self._device
            )
            yield SpecialBatch(
                first=first,
                rows=some,
                samples=np.searchsorted(batch.sampling_rows, some),
                slots=slots,
                seq_lens=batch.seq_lens[some],
                places=place_index,
                slot_index=slot_index,
                shares=list(self._shares(slots, slot_index)),
            )

    def _shares(self, slots: Int32, slot_index: Tensor) -> Iterator[Share]:
        """Of each processor that has rows here."""
        for processor, accepted in zip(self._processors, self._accepted, strict=True):
            own = np.flatnonzero(accepted[slots])
            if len(own) == len(slots):
                yield Share(processor, None, Slots.of(slots.tolist(), slot_index))
            elif len(own):
                index = to_device(own, self._device)
                yield Share(
                    processor,
                    index,
                    Slots.of(slots[own].tolist(), slot_index.index_select(0, index)),
                )
