"""The last stage of a CPU's runner: logits, the tokens sampled from them, and drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.cpu.cpu_model import CPU, CpuModel
from sidestep.executor.cpu.drafted_rows import DraftedRows
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.prompt_logprobs import prompt_logprobs, with_prompt_tokens
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialBatch, make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs, encode_logprobs
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.step import Int32, Int64, StepInput, StepOutput


@dataclass(slots=True)
class Sampling:
    """The tokens that a step samples; N tokens, of its rows and behind their drafts."""

    batch: HostBatch
    logits: Tensor
    """[N, V] Of batch.logits_tokens."""
    apart: Apart | None
    """Rows that are not sampled with the plain rows."""
    sampled: Int32
    """[N] -1 where no token has been sampled."""
    about_prompts: list[Logprobs]
    forced: dict[int, Int32] = field(default_factory=dict)
    """By slot, the tokens that a grammar alone decides."""


class LastStage:
    """The part of a CPU's runner that samples."""

    def __init__(
        self,
        args: WorkerArgs,
        limits: StepLimits,
        model: CpuModel,
        state: HostTables,
        drafted: DraftedRows,
    ) -> None:
        """Begin without requests. Raises EngineStartError."""
        self._model = model
        self._drafted = drafted
        self.sampler = Sampler(state)
        self.special = make_special_rows(args, limits, CPU)

    def compute(self, inputs: Tensor, batch: HostBatch) -> Sampling:
        """Compute the last layers and the head, and sample the plain rows."""
        # 1. The model, for tokens that sample and for prompt tokens with requested logprobs.
        prompts, num_sampled = self.special.find_prompts(batch), len(batch.logits_tokens)
        rows = None if num_sampled == batch.total_tokens else torch.from_numpy(batch.logits_tokens)
        if prompts is not None:
            rows = with_prompt_tokens(torch.from_numpy(batch.logits_tokens), prompts)
        decoder, stream = self._model.decoder, self._model.states(inputs, batch, rows)
        logits = decoder.logits(stream if prompts is None else stream.part(0, num_sampled))
        about_prompts = list[Logprobs]()
        if prompts is not None:
            about_prompts = prompt_logprobs(decoder, stream, num_sampled, prompts)
        # 2. Plain rows, before any masks are awaited.
        apart = self.special.find(batch)
        sampled = np.full(num_sampled, -1, np.int32)
        is_plain = np.ones(num_sampled, np.bool_)
        if apart is not None:
            is_plain = ~np.isin(batch.logits_rows, apart.all)
        self._sample_tokens(logits, batch, np.flatnonzero(is_plain), sampled)
        return Sampling(batch, logits, apart, sampled, about_prompts)

    def sample_rest(self, sampling: Sampling, step: StepInput, output: StepOutput) -> None:
        """Sample the other rows, accept drafts, and make the next ones; tell the output."""
        output.prompt_logprobs = encode_logprobs(sampling.about_prompts)
        if not len(sampling.sampled):
            return
        # 1. Rows with masks verify only the drafts that have a mask behind them.
        batch, logits, apart = sampling.batch, sampling.logits, sampling.apart
        sampled, valid = sampling.sampled, batch.sampled_sizes
        slots, logprobs = batch.slots[batch.sampling_rows], list[Logprobs]()
        held = self.special.has_grammar(slots)
        if held.any() and batch.num_drafts is not None:
            most = 1 + self.special.masks.num_masked_drafts(slots)
            valid = np.where(held, np.minimum(valid, most), valid)
        if apart is not None:
            masked = np.flatnonzero(np.isin(batch.logits_rows, apart.masked))
            self._sample_tokens(logits, batch, masked, sampled, self.special.masks)
            logprobs = self._sample_special(logits, batch, apart.special, valid, sampled)
        output.logprobs = encode_logprobs(logprobs)
        # 2. Drafts.
        accepted = self._drafted.accept(batch, sampled, valid)
        self._drafted.propose(batch, accepted, sampling.forced)
        output.token_ids = accepted.token_ids
        self._drafted.describe(output, step, accepted, slots if held.any() else None)

    def _sample_tokens(
        self,
        logits: Tensor,
        batch: HostBatch,
        which: Int64,
        sampled: Int32,
        masks: GrammarMasks | None = None,
    ) -> None:
        """Write to `sampled` the tokens of some of the logits' rows, which are sampled at once."""
        if not len(which):
            return
        slots = batch.slots[batch.logits_rows[which]]
        if len(which) < len(logits):
            logits = logits.index_select(0, torch.from_numpy(which))
        if masks is not None:
            offsets = which - np.searchsorted(batch.logits_rows, batch.logits_rows[which])
            masks.mask(logits, torch.from_numpy(masks.marks(slots, offsets)))
        sampled[which] = self.sampler(logits, slots, batch.logits_lens[which]).numpy()

    def _sample_special(
        self, logits: Tensor, batch: HostBatch, rows: Int64, valid: Int64, sampled: Int32
    ) -> list[Logprobs]:
        """Sample special rows: first each row's token, then behind drafts as they are accepted."""
        logprobs, offset = list[Logprobs](), 0
        while len(rows):
            which = np.searchsorted(batch.logits_rows, rows) + offset

            def sample(wide: Tensor, part: SpecialBatch, which: Int64 = which) -> Tensor:
                tokens = self.sampler(wide, part.slots, part.seq_lens)
                sampled[which[part.first : part.first + len(part.rows)]] = tokens.numpy()
                return tokens

            logprobs += self.special.run(logits, batch, rows, which, sample, offset)
            left = valid[np.searchsorted(batch.sampling_rows, rows)] > offset + 1
            rows, which = rows[left], which[left]
            if len(rows):
                drafts = self._drafted.draft_at(batch.slots[rows], offset)
                rows = rows[sampled[which] == drafts]
            offset += 1
        return logprobs
