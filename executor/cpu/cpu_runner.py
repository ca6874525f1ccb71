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
from sidestep.executor.runner.torch_profile import TakesProfiles
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.executor.sampling.grammar_masks import GrammarMasks
from sidestep.executor.sampling.prompt_logprobs import prompt_logprobs, with_prompt_tokens
from sidestep.executor.sampling.sampler import Sampler
from sidestep.executor.sampling.special_rows import SpecialBatch, make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs, encode_logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import CPU_BLOCK_SIZE
from sidestep.ipc.transport.step import Int64, StepInput, StepMasks, StepOutput
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
        self._last_sampled = torch.zeros(self._limits.num_slots, dtype=torch.int64)
        self._pipeline = Pipeline(args, self._last_sampled, self._limits.max_steps_in_flight)
        if self._stage.is_last:
            self._sampler = Sampler(self._state)
            self._special = make_special_rows(args, self._limits, _CPU)
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
        # 1. Apply the differences and lay this step's tokens out.
        self._state.apply(step)
        batch = make_batch(self._state, step, self._block_size)
        if len(step.copy_sources):
            self._attention.copy_blocks(step.copy_sources, step.copy_targets)
        # 2. The inputs of this rank's layers, and their outputs.
        if self._stage.is_first:
            self._pipeline.begin_step(step.beat)
            inputs = self._input_ids(batch)
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
        # 3. The ids that later steps' inputs are taken from in the first stage.
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
        token_ids, logprobs = np.empty(0, np.int32), list[Logprobs]()
        if num_sampled:
            # 2. Sample the next step's inputs: plain rows first, then the others.
            apart, sampling = self._special.find(batch), batch.sampling_rows
            self._sample(
                logits,
                batch,
                sampling if apart is None else np.setdiff1d(sampling, np.concatenate(apart)),
            )
            if step.awaits_masks and receive_masks is not None:
                self._special.masks.take(step, receive_masks())
            if apart is not None:
                self._sample(logits, batch, apart.masked, self._special.masks)
                logprobs = self._special.run(
                    logits,
                    batch,
                    apart.special,
                    np.searchsorted(sampling, apart.special),
                    self._sample_special,
                )
            token_ids = self._last_sampled.numpy()[batch.slots[batch.sampling_rows]].astype(
                np.int32
            )
        return StepOutput(
            step.step_id,
            start,
            time.monotonic_ns(),
            token_ids,
            logprobs=encode_logprobs(logprobs),
            prompt_logprobs=encode_logprobs(about_prompts),
        )

    def _sample(
        self, logits: Tensor, batch: HostBatch, rows: Int64, masks: GrammarMasks | None = None
    ) -> None:
        """Sample some of the rows that sample; `logits` has one row for each of them all."""
        if not len(rows):
            return
        slots = batch.slots[rows]
        if len(rows) < len(logits):
            logits = logits.index_select(
                0, torch.from_numpy(np.searchsorted(batch.sampling_rows, rows))
            )
        if masks is not None:
            masks.mask(logits, torch.from_numpy(masks.marks(slots)))
        tokens = self._sampler(logits, slots, batch.seq_lens[rows])
        self._last_sampled.index_copy_(0, torch.from_numpy(slots).long(), tokens)

    def _sample_special(self, logits: Tensor, part: SpecialBatch) -> Tensor:
        tokens = self._sampler(logits, part.slots, part.seq_lens)
        self._last_sampled.index_copy_(0, part.slot_index, tokens)
        return tokens

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

    def _input_ids(self, batch: HostBatch) -> Tensor:
        """Return known ids from the host, and sampled ids from steps before."""
        token_ids = torch.from_numpy(batch.token_ids)
        if len(batch.unknown):
            sampled = self._last_sampled.index_select(
                0, torch.from_numpy(batch.row_slots[batch.unknown])
            )
            token_ids.index_copy_(0, torch.from_numpy(batch.unknown), sampled.int())
        return token_ids

    def _describe(self) -> str:
        return f"cpu ({torch.get_num_threads()} threads, {str(self._dtype).removeprefix('torch.')})"
