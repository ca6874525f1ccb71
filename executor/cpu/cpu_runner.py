"""Run a model's steps on a CPU, which computes them as the host lays them out.

`execute` returns when the step is done, or this stage's part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, StepBatch
from sidestep.executor.base import WorkerReady
from sidestep.executor.cpu.drafted_rows import DraftedRows
from sidestep.executor.models.decoder import DecoderForCausalLM, attention_shape
from sidestep.executor.models.model_loading import (
    load_model,
    load_rotary,
    pick_attention,
    pick_dtype,
)
from sidestep.executor.models.new_weights import TakesWeights
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch, make_batch
from sidestep.executor.runner.kv_cache_size import cpu_kv_blocks
from sidestep.executor.runner.runner import DoneOutput, PendingOutput, WorkerArgs
from sidestep.executor.runner.sleep import SleepingRunner, resident_bytes, return_freed_memory
from sidestep.executor.runner.slot_state import SlotState
from sidestep.executor.runner.torch_profile import TakesProfiles
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.prompt_logprobs import prompt_logprobs, with_prompt_tokens
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialBatch, make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs, encode_logprobs
from sidestep.executor.speculation.proposer import make_proposer
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import CPU_BLOCK_SIZE
from sidestep.ipc.transport.step import Int32, Int64, StepInput, StepMasks, StepOutput
from sidestep.kernels.ops.rms_norm import Stream

_CPU = torch.device("cpu")


class ModelRunner(TakesProfiles, TakesWeights, SleepingRunner):
    """A torch model on a CPU."""

    def __init__(self, args: WorkerArgs) -> None:
        self._args = args
        self._dtype = pick_dtype(args, _CPU)
        self._stage = args.stage
        self._limits = args.scheduler.limits("cpu", self._stage.count)
        self._block_size = args.cache.block_size or CPU_BLOCK_SIZE
        self._parallel = Parallel(
            args.rank_in_stage,
            args.parallel.tensor_parallel_size,
            stage=self._stage.index,
            num_stages=self._stage.count,
            rendezvous=args.rendezvous,
        )

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        """Load the weights, and allocate the KV cache and the tables."""
        args = self._args
        self._model = self._read_weights(args)
        shape = attention_shape(args.spec, self._parallel, self._stage)
        # Block ids are common to all ranks, so the rank with the least room decides.
        self._num_blocks = self._parallel.minimum(
            cpu_kv_blocks(args, self._limits, shape.bytes_per_token(self._dtype), self._block_size)
        )
        self._attention = self._make_attention()
        self._state = HostTables(self._limits.num_slots, args.max_model_len, self._block_size)
        slots = SlotState(self._limits.num_slots, self._limits.num_drafts)
        self._pipeline = Pipeline(args, slots.table, self._limits.max_steps_in_flight)
        proposer = None
        if self._stage.is_last:
            self._sampler = Sampler(self._state)
            self._special = make_special_rows(args, self._limits, _CPU)
            proposer = make_proposer(args.scheduler.speculation, args.spec.vocab_size)
        self._drafted = DraftedRows(self._state, slots, proposer)
        return WorkerReady(
            num_kv_blocks=self._num_blocks,
            block_size=self._block_size,
            device_type="cpu",
            device=self._describe(),
        )

    def _make_attention(self) -> AttentionBackend:
        """Make the attention backend with an empty cache."""
        args = self._args
        return pick_attention(args, _CPU)(
            AttentionSetup(
                shape=attention_shape(args.spec, self._parallel, self._stage),
                num_blocks=self._num_blocks,
                block_size=self._block_size,
                dtype=self._dtype,
                device=_CPU,
                rotary=load_rotary(args, _CPU),
                norm_eps=args.spec.rms_norm_eps,
                max_rows=self._limits.max_num_seqs,
            )
        )

    def _free(self, level: int) -> int:
        """Free the KV cache, and at level 2 the weights.

        Level 1 keeps the weights in the host's memory, where they are already.
        """
        before = resident_bytes()
        del self._attention
        if level == 2:
            del self._model
        return_freed_memory()
        return max(0, before - resident_bytes())

    @torch.inference_mode()
    def _restore(self, level: int) -> None:
        """Read the weights again after level 2, and allocate the cache."""
        if level == 2:
            try:
                self._model = self._read_weights(self._args)
            except EngineStartError as error:
                raise CallRefusedError(str(error)) from None
        self._attention = self._make_attention()

    @torch.inference_mode()
    def _read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model with its weights laid out for this CPU."""
        return load_model(args, self._parallel, self._dtype, _CPU)

    def _use_weights(self, model: DecoderForCausalLM) -> None:
        """Put the model in the place of the old one."""
        self._model = model
        return_freed_memory()

    @torch.inference_mode()
    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        """Compute a step, and return its output."""
        start = time.monotonic_ns()
        # 1. Apply the differences, and what the last stage has sent of earlier steps; lay this
        #    step's tokens out.
        self._state.apply(step)
        self._pipeline.begin_step(step.beat)
        self._drafted.enter(step)
        batch = make_batch(self._state, step, self._block_size, self._drafted.count(step))
        if len(step.copy_sources):
            self._attention.copy_blocks(step.copy_sources, step.copy_targets)
        # 2. The inputs of this rank's layers, and their outputs.
        if self._stage.is_first:
            inputs = torch.from_numpy(self._drafted.input_ids(batch))
        else:
            inputs = self._pipeline.receive_stream(
                torch.empty(batch.total_tokens, self._args.spec.hidden_size, dtype=self._dtype)
            )
            start = time.monotonic_ns()  # until here the stage has only waited
        if self._stage.is_last:
            output = self._compute_tokens(inputs, batch, step, start, receive_masks)
        else:
            self._pipeline.send_stream(self._forward(inputs, batch, None).hidden)
            output = StepOutput(step.step_id, start, time.monotonic_ns(), np.empty(0, np.int32))
        # 3. The slots' values that later steps of other stages begin from.
        self._pipeline.end_step(step.beat, torch.from_numpy(step.slots.astype(np.int64)))
        return DoneOutput(output)

    def _compute_tokens(
        self,
        inputs: Tensor,
        batch: HostBatch,
        step: StepInput,
        start: int,
        receive_masks: Callable[[], StepMasks] | None,
    ) -> StepOutput:
        """Compute the last layers and the head, and sample."""
        # 1. The model, for tokens that sample and for prompt tokens with requested logprobs.
        self._special.enter(step)
        prompts, num_sampled = self._special.find_prompts(batch), len(batch.logits_tokens)
        rows = None if num_sampled == batch.total_tokens else torch.from_numpy(batch.logits_tokens)
        if prompts is not None:
            rows = with_prompt_tokens(torch.from_numpy(batch.logits_tokens), prompts)
        stream = self._forward(inputs, batch, rows)
        logits = self._model.logits(stream if prompts is None else stream.part(0, num_sampled))
        about_prompts = (
            [] if prompts is None else prompt_logprobs(self._model, stream, num_sampled, prompts)
        )
        output = StepOutput(step.step_id, start, 0, np.empty(0, np.int32))
        if num_sampled:
            # 2. Sample the next step's inputs, and draft what may follow them.
            logprobs = self._sample(logits, batch, step, output, receive_masks)
            output.logprobs = encode_logprobs(logprobs)
        output.prompt_logprobs = encode_logprobs(about_prompts)
        output.end_ns = time.monotonic_ns()
        return output

    def _sample(
        self,
        logits: Tensor,
        batch: HostBatch,
        step: StepInput,
        output: StepOutput,
        receive_masks: Callable[[], StepMasks] | None,
    ) -> list[Logprobs]:
        """Sample from the logits of batch.logits_tokens; return the logprobs asked for."""
        apart, rows = self._special.find(batch), batch.logits_rows
        sampled = np.full(len(rows), -1, np.int32)
        valid = batch.sampled_sizes
        # 1. Plain rows, before any masks are awaited.
        is_plain = np.ones(len(rows), np.bool_) if apart is None else ~np.isin(rows, apart.all)
        self._sample_tokens(logits, batch, np.flatnonzero(is_plain), sampled)
        # 2. Rows with masks, which verify only the drafts that have a mask behind them.
        forced = dict[int, Int32]()
        if step.awaits_masks and receive_masks is not None:
            masks = receive_masks()
            self._special.masks.take(step, masks)
            forced = {int(step.slots[row]): ids for row, ids in masks.forced_by_row().items()}
        slots, logprobs = batch.slots[batch.sampling_rows], list[Logprobs]()
        held = self._special.has_grammar(slots)
        if held.any() and batch.num_drafts is not None:
            most = 1 + self._special.masks.num_masked_drafts(slots)
            valid = np.where(held, np.minimum(valid, most), valid)
        if apart is not None:
            masked = np.flatnonzero(np.isin(rows, apart.masked))
            self._sample_tokens(logits, batch, masked, sampled, self._special.masks)
            logprobs = self._sample_special(logits, batch, apart.special, valid, sampled)
        # 3. Accept drafts, and make the next ones.
        accepted = self._drafted.accept(batch, sampled, valid)
        self._drafted.propose(batch, accepted, forced)
        output.token_ids = accepted.token_ids
        self._drafted.describe(output, step, accepted, slots if held.any() else None)
        return logprobs

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
        sampled[which] = self._sampler(logits, slots, batch.logits_lens[which]).numpy()

    def _sample_special(
        self, logits: Tensor, batch: HostBatch, rows: Int64, valid: Int64, sampled: Int32
    ) -> list[Logprobs]:
        """Sample special rows: first each row's token, then behind drafts as they are accepted."""
        logprobs, offset = list[Logprobs](), 0
        while len(rows):
            which = np.searchsorted(batch.logits_rows, rows) + offset

            def sample(wide: Tensor, part: SpecialBatch, which: Int64 = which) -> Tensor:
                tokens = self._sampler(wide, part.slots, part.seq_lens)
                sampled[which[part.first : part.first + len(part.rows)]] = tokens.numpy()
                return tokens

            logprobs += self._special.run(logits, batch, rows, which, sample, offset)
            left = valid[np.searchsorted(batch.sampling_rows, rows)] > offset + 1
            rows, which = rows[left], which[left]
            if len(rows):
                drafts = self._drafted.draft_at(batch.slots[rows], offset)
                rows = rows[sampled[which] == drafts]
            offset += 1
        return logprobs

    def _forward(self, inputs: Tensor, batch: HostBatch, rows: Tensor | None) -> Stream:
        """Return what this rank's last layer gives for the tokens at `rows`, or for all."""
        self._attention.begin_step(
            StepBatch(
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                host=batch,
                rows=None,
            )
        )
        return self._model.states(inputs, self._attention, rows)

    def _describe(self) -> str:
        return f"cpu ({torch.get_num_threads()} threads, {str(self._dtype).removeprefix('torch.')})"
