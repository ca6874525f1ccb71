"""Rows whose requests ask for more than temperature, filters and seed.

They are left out when a step's plain rows are sampled, and sampled after those, on a float32 copy
of their logits. So plain rows pay nothing for them, and do not change; a captured step stays one
graph; penalties are not rounded to the model's type; and the model's own logits are still there
when a row has been sampled. `before_sampling` and `after_sampling` are called only in steps that
have such rows.

A row with a grammar and no other control is not a special row. Its logits are masked in place, and
it is sampled as plain rows are, but later, when the masks have come.

Order of side effects: `enter` is called with the step that brings a request, before the step's rows
are looked for. State that depends on sampled tokens lives on the device and advances in
`after_sampling`, in the order of the steps, so that it is complete with steps in flight too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.executor.runner.runner import RowError, WorkerArgs
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
from sidestep.ipc.params.logits_controls import decode_controls
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.step import Int32, Int64, StepInput

MOST_ROWS = 64
"""Rows that are copied to float32 at a time, which bounds the memory."""


class Share(NamedTuple):
    """The rows of a SpecialBatch that one processor has accepted."""

    processor: LogitsProcessor
    indices: Tensor | None
    """int64 on the device: their indices in the batch; None for all."""
    slots: Slots


@dataclass(frozen=True, kw_only=True)
class SpecialBatch:
    """Some special rows that sample in a step; n of them, at most MOST_ROWS."""

    first: int
    """Number of the step's special rows before these; a multiple of MOST_ROWS."""
    rows: Int64
    """[n] Indices among the rows of the step."""
    samples: Int64
    """[n] Indices among the rows that sample."""
    slots: Int32
    """[n]"""
    seq_lens: Int32
    """[n] Tokens before the one that is sampled, which is its position."""
    logits_rows: Tensor
    """int64 [n] on the device: indices among the rows of the step's logits."""
    slot_index: Tensor
    """int64 [n] on the device: `slots`."""
    shares: Sequence[Share] = ()
    """The rows of each processor that has any."""


Sample = Callable[[Tensor, SpecialBatch], Tensor]
"""Sample from logits float32 [n, V], which it may change; returns int64 [n], after it has set
`last_sampled`."""


def make_special_rows(args: WorkerArgs, limits: StepLimits, device: torch.device) -> SpecialRows:
    """Return SpecialRows with everything that changes logits, in its order.

    Raises EngineStartError for a class of the user's that cannot be made.
    """
    setup = ProcessorSetup(
        device=device, vocab_size=args.spec.vocab_size, num_slots=limits.num_slots
    )
    own = [make_processor(target, setup) for target in args.model.logits_processors or ()]
    processors = [AllowedTokens(setup), BadWords(setup), LogitBias(setup), *own, Penalties(setup)]
    masks = GrammarMasks(setup, limits.num_masks, limits.num_drafts)
    return SpecialRows(processors, masks, limits.num_slots, device)


def make_processor(target: str, setup: ProcessorSetup) -> LogitsProcessor:
    """Return an instance of the class that 'module:Class' names."""
    try:
        processor = registry.load(target)(setup)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise EngineStartError(f"logits_processors: {target} cannot be made: {problem}") from error
    if not isinstance(processor, LogitsProcessor):
        raise EngineStartError(f"logits_processors: {target} is not a LogitsProcessor")
    return processor


class SpecialRows:
    """Knows which slots hold requests with controls, and runs their processors."""

    def __init__(
        self,
        processors: Sequence[LogitsProcessor],
        masks: GrammarMasks,
        num_slots: int,
        device: torch.device,
    ) -> None:
        """Start without requests.

        processors: in the order in which they change logits. masks: applied after them; they are
        given what rows with a grammar may sample before any of these rows is sampled.
        """
        self._processors = [*processors, masks]
        self.masks = masks
        self._device = device
        self._accepted = np.zeros((len(self._processors), num_slots), np.bool_)
        self._known = np.zeros(num_slots, np.bool_)
        """Slots of requests with controls."""
        self._special = np.zeros(num_slots, np.bool_)
        """Slots among those whose rows are special."""
        self._masked = np.zeros(num_slots, np.bool_)
        """Slots among those whose rows only wait for masks."""
        self._num_logprobs = np.full(num_slots, -1, np.int32)
        self._num_prompt_logprobs = np.full(num_slots, -1, np.int32)
        self.without_drafts = np.zeros(num_slots, np.bool_)
        """Slots among those of which some processor handles no drafts that wait to be accepted."""
        self._count = 0

    def __repr__(self) -> str:
        return f"SpecialRows(slots {np.flatnonzero(self._known).tolist()})"

    def enter(self, step: StepInput) -> None:
        """Take in the requests of a step, and forget those that had their slots before."""
        if not (self._count or len(step.new_controls)):
            return
        prompts = step.entering["num_prompt"].tolist()
        for entering, num_prompt in zip(step.entering_rows(), prompts, strict=True):
            slot, _, sent, _, controls = entering
            self._leave(slot)
            if controls.start < controls.stop:
                tokens = step.new_token_ids[sent].copy()
                try:
                    self._enter(
                        EnteringRequest(
                            slot=slot,
                            controls=decode_controls(step.new_controls[controls].tobytes()),
                            prompt_token_ids=tokens[:num_prompt],
                            output_token_ids=tokens[num_prompt:],
                        )
                    )
                except Exception as error:
                    raise RowError(slot, error) from error
        self._count = int(self._known.sum())

    def clear(self) -> None:
        """Forget all requests, after an exception in a step."""
        for slot in np.flatnonzero(self._known).tolist():
            self._leave(slot)
        self._count = 0

    def find(self, batch: HostBatch) -> Apart | None:
        """Return rows that sample in this step, but are not plain; None if there is none."""
        if not self._count or not self._known[batch.slots].any():
            return None
        special, masked = (
            np.flatnonzero(kind[batch.slots] & batch.samples)
            for kind in (self._special, self._masked)
        )
        return Apart(special, masked) if len(special) or len(masked) else None

    def has_grammar(self, slots: Int32) -> npt.NDArray[np.bool_]:
        """Return which of these slots hold a request with a grammar."""
        found: npt.NDArray[np.bool_] = self._accepted[-1, slots]
        return found

    def find_prompts(self, batch: HostBatch) -> PromptTokens | None:
        """Return this step's prompt tokens whose next token's log-probability is asked for.

        None if there is none.
        """
        if not self._count:
            return None
        return find_prompt_tokens(batch, self._num_prompt_logprobs)

    def run(
        self,
        logits: Tensor,
        batch: HostBatch,
        rows: Int64,
        logits_rows: Int64,
        sample: Sample,
        offset: int = 0,
    ) -> list[Logprobs]:
        """Sample these rows of a step, and return the log-probabilities that they ask for.

        logits: [R, V] of any type. logits_rows: the rows' indices in it. offset: number of drafts
        of the rows that have been accepted, whose processors thus know the tokens.
        """
        logprobs = []
        self.masks.offset = offset
        for part in self.parts(batch, rows, logits_rows, offset):
            wide = logits.index_select(0, part.logits_rows).float()
            self.before_sampling(wide, part)
            tokens = sample(wide, part)
            found = self.after_sampling(logits, tokens, part)
            if found is not None:
                logprobs.append(found)
        return logprobs

    def before_sampling(self, wide: Tensor, part: SpecialBatch) -> None:
        """Change logits, float32 [n, V], in place."""
        for processor, indices, slots in part.shares:
            own = wide if indices is None else wide.index_select(0, indices)
            try:
                processor.apply(own, slots)
            except Exception as error:
                if len(slots) == 1:
                    raise RowError(slots[0], error) from error
                raise
            if indices is not None:
                wide.index_copy_(0, indices, own)

    def after_sampling(
        self, logits: Tensor, token_ids: Tensor, part: SpecialBatch
    ) -> Logprobs | None:
        """Tell the processors what was sampled, and return the log-probabilities asked for.

        token_ids int64 [n]; logits [R, V] as the model gave them, where part.logits_rows are the
        rows meant.
        """
        self.tell(token_ids, part)
        return self.logprobs(
            logits,
            token_ids,
            part,
            part.logits_rows,
            lambda asking: part.seq_lens[asking].astype(np.int64),
        )

    def tell(self, token_ids: Tensor, part: SpecialBatch) -> None:
        """Tell the processors what was sampled; int64 [n], -1 where a token does not count."""
        for processor, indices, slots in part.shares:
            processor.sampled(
                token_ids if indices is None else token_ids.index_select(0, indices), slots
            )

    def logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        part: SpecialBatch,
        logits_rows: Tensor,
        positions: Callable[[Int64], Int64],
    ) -> Logprobs | None:
        """Return the log-probabilities that these rows ask for.

        token_ids int64 [n]: sampled from the rows of `logits` at `logits_rows`. positions: returns
        the tokens' positions in their requests, for some indices of rows in the part.
        """
        numbers = self._num_logprobs[part.slots]
        asking = np.flatnonzero(numbers >= 0)
        if not len(asking):
            return None
        numbers = numbers[asking]
        if len(asking) < len(part.slots):
            index = to_device(asking, self._device)
            logits_rows = logits_rows.index_select(0, index)
            token_ids = token_ids.index_select(0, index)
        packed = logprobs_of(logits.index_select(0, logits_rows), token_ids, int(numbers.max()))
        return make_logprobs(packed, part.samples[asking], positions(asking), numbers)

    def _enter(self, request: EnteringRequest) -> None:
        slot = request.slot
        self._known[slot] = True
        self._num_logprobs[slot] = request.controls.logprobs
        self._num_prompt_logprobs[slot] = request.controls.prompt_logprobs
        for processor, accepted in zip(self._processors, self._accepted, strict=True):
            accepted[slot] = not request.controls.is_beam and processor.enter(request)
        self._special[slot] = self._accepted[:-1, slot].any() or self._num_logprobs[slot] >= 0
        self._masked[slot] = self._accepted[-1, slot] and not self._special[slot]
        self.without_drafts[slot] = any(
            accepted[slot] and not processor.handles_drafts
            for processor, accepted in zip(self._processors, self._accepted, strict=True)
        )

    def _leave(self, slot: int) -> None:
        if not self._known[slot]:
            return
        self._known[slot] = self._special[slot] = self._masked[slot] = False
        self.without_drafts[slot] = False
        self._num_logprobs[slot] = self._num_prompt_logprobs[slot] = -1
        for processor, accepted in zip(self._processors, self._accepted, strict=True):
            if accepted[slot]:
                accepted[slot] = False
                processor.leave(slot)

    def parts(
        self, batch: HostBatch, rows: Int64, logits_rows: Int64, offset: int = 0
    ) -> Iterator[SpecialBatch]:
        """Yield special rows in parts; see `run`."""
        for first in range(0, len(rows), MOST_ROWS):
            some = rows[first : first + MOST_ROWS]
            slots = batch.slots[some]
            logits_index, slot_index = to_device(
                np.stack((logits_rows[first : first + MOST_ROWS], slots.astype(np.int64))),
                self._device,
            )
            yield SpecialBatch(
                first=first,
                rows=some,
                samples=np.searchsorted(batch.sampling_rows, some),
                slots=slots,
                seq_lens=_lengths_before_drafts(batch, some) + np.int32(offset),
                logits_rows=logits_index,
                slot_index=slot_index,
                shares=list(self._shares(slots, slot_index)),
            )

    def _shares(self, slots: Int32, slot_index: Tensor) -> Iterator[Share]:
        """Yield the share of each processor that has rows here."""
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


def _lengths_before_drafts(batch: HostBatch, rows: Int64) -> Int32:
    """Return the lengths of some rows without the drafts at their end."""
    lengths = batch.seq_lens[rows]
    return lengths if batch.num_drafts is None else lengths - batch.num_drafts[rows]
