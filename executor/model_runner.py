"""Runs a model's steps on a CPU: what the host lays out, it computes. `execute` returns when the step is done."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionSetup, StepBatch
from sidestep.executor.base import WorkerReady
from sidestep.executor.grammar_masks import GrammarMasks
from sidestep.executor.input_batch import HostBatch, make_batch
from sidestep.executor.kv_cache_size import cpu_kv_blocks
from sidestep.executor.logprobs import Logprobs, encode_logprobs
from sidestep.executor.model_loading import load_model, load_rotary, pick_attention, pick_dtype
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.parallel_state import Parallel
from sidestep.executor.prompt_logprobs import PromptTokens, prompt_logprobs, with_prompt_tokens
from sidestep.executor.request_state import RequestState
from sidestep.executor.runner import DoneOutput, PendingOutput, Runner, WorkerArgs
from sidestep.executor.sampler import Sampler
from sidestep.executor.special_rows import SpecialBatch, make_special_rows
from sidestep.ipc.step import Int64, StepInput, StepMasks, StepOutput
from sidestep.kernels.rms_norm import Stream

_CPU = torch.device("cpu")
_BLOCK_SIZE = 16


class ModelRunner(Runner):
    """A torch model on a CPU."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._dtype = pick_dtype(args, _CPU)
        self._limits = args.scheduler.limits("cpu")
        self._block_size = args.cache.block_size or _BLOCK_SIZE
        self._parallel = Parallel(args.rank, args.parallel.tensor_parallel_size, rendezvous=args.rendezvous)

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        args = self._args
        self._model = load_model(args, self._parallel, self._dtype, _CPU)
        shape = attention_shape(args.spec, self._parallel)
        # Block ids are common to all ranks, so the rank with the least room decides.
        num_blocks = self._parallel.minimum(
            cpu_kv_blocks(args, self._limits, shape.bytes_per_token(self._dtype), self._block_size))
        self._attention = pick_attention(args, _CPU)(AttentionSetup(
            shape=shape, num_blocks=num_blocks, block_size=self._block_size, dtype=self._dtype, device=_CPU,
            rotary=load_rotary(args, _CPU), norm_eps=args.spec.rms_norm_eps, max_rows=self._limits.max_num_seqs))
        self._state = RequestState(self._limits.num_slots, args.max_model_len, self._block_size)
        self._last_sampled = torch.zeros(self._limits.num_slots, dtype=torch.int64)
        self._sampler = Sampler(self._state)
        self._special = make_special_rows(args, self._limits, _CPU)
        return WorkerReady(num_kv_blocks=num_blocks, block_size=self._block_size, device_type="cpu",
                           device=self._describe())

    @torch.inference_mode()
    def execute(self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None) -> PendingOutput:
        start = time.monotonic_ns()
        # 1. What is new, and how this step's tokens lie.
        self._state.apply(step)
        self._special.enter(step)
        batch = make_batch(self._state, step, self._block_size)
        if len(step.copy_sources):
            self._attention.copy_blocks(step.copy_sources, step.copy_targets)
        # 2. The model, for the tokens that sample, and those of prompts that are asked about.
        prompts = self._special.find_prompts(batch)
        stream = self._forward(batch, prompts)
        logits = self._model.logits(stream if prompts is None else stream.part(0, len(batch.logits_tokens)))
        about_prompts = [] if prompts is None else prompt_logprobs(
            self._model, stream, len(batch.logits_tokens), prompts)
        token_ids, logprobs = np.empty(0, np.int32), list[Logprobs]()
        if len(batch.logits_tokens):
            # 3. The tokens, which are the next step's inputs: of plain rows, then of the others.
            apart, rows = self._special.find(batch), batch.sampling_rows
            self._sample(logits, batch, rows if apart is None else np.setdiff1d(rows, np.concatenate(apart)))
            if step.awaits_masks and receive_masks is not None:
                self._special.masks.take(step, receive_masks())
            if apart is not None:
                self._sample(logits, batch, apart.masked, self._special.masks)
                logprobs = self._special.run(logits, batch, apart.special, np.searchsorted(rows, apart.special),
                                             self._sample_special)
            token_ids = self._last_sampled.numpy()[batch.slots[batch.sampling_rows]].astype(np.int32)
        return DoneOutput(StepOutput(
            step.step_id, start, time.monotonic_ns(), token_ids, logprobs=encode_logprobs(logprobs),
            prompt_logprobs=encode_logprobs(about_prompts)))

    def _sample(self, logits: Tensor, batch: HostBatch, rows: Int64, masks: GrammarMasks | None = None) -> None:
        """Some of the rows that sample; logits are of them all."""
        if not len(rows):
            return
        slots = batch.slots[rows]
        if len(rows) < len(logits):
            logits = logits.index_select(0, torch.from_numpy(np.searchsorted(batch.sampling_rows, rows)))
        if masks is not None:
            masks.mask(logits, torch.from_numpy(masks.marks(slots)))
        tokens = self._sampler(logits, slots, batch.seq_lens[rows])
        self._last_sampled.index_copy_(0, torch.from_numpy(slots).long(), tokens)

    def _sample_special(self, logits: Tensor, part: SpecialBatch) -> Tensor:
        tokens = self._sampler(logits, part.slots, part.seq_lens)
        self._last_sampled.index_copy_(0, part.slot_index, tokens)
        return tokens

    def _forward(self, batch: HostBatch, prompts: PromptTokens | None) -> Stream:
        """What the last layer gives for the tokens that sample, and after them for those of prompts."""
        token_ids = self._input_ids(batch)
        self._attention.begin_step(StepBatch(
            positions=torch.from_numpy(batch.positions), places=torch.from_numpy(batch.slot_mapping), host=batch,
            rows=None))
        every = len(batch.logits_tokens) == batch.total_tokens
        rows = None if every else torch.from_numpy(batch.logits_tokens)
        if prompts is not None:
            rows = with_prompt_tokens(torch.from_numpy(batch.logits_tokens), prompts)
        return self._model.states(token_ids, self._attention, rows)

    def _input_ids(self, batch: HostBatch) -> Tensor:
        """Known ids from the host, sampled ones from the step before."""
        token_ids = torch.from_numpy(batch.token_ids)
        if len(batch.unknown):
            sampled = self._last_sampled.index_select(0, torch.from_numpy(batch.row_slots[batch.unknown]))
            token_ids.index_copy_(0, torch.from_numpy(batch.unknown), sampled.int())
        return token_ids

    def _describe(self) -> str:
        return f"cpu ({torch.get_num_threads()} threads, {str(self._dtype).removeprefix('torch.')})"
