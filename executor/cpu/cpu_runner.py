"""Run a model's steps on a CPU, which computes them as the host lays them out.

`execute` returns when the step is done, or this stage's part of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.base import WorkerReady
from sidestep.executor.cpu.cpu_model import CPU, CpuModel
from sidestep.executor.cpu.drafted_rows import DraftedRows
from sidestep.executor.cpu.last_stage import LastStage, Sampling
from sidestep.executor.models.new_weights import WeightCalls
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.pooling.pooler import Pooler
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import HostBatch, make_batch
from sidestep.executor.runner.runner import DoneOutput, PendingOutput, WorkerArgs
from sidestep.executor.runner.sleep import SleepCalls
from sidestep.executor.runner.slot_state import SlotState
from sidestep.executor.runner.step_order import StepOrder
from sidestep.executor.runner.torch_profile import TorchProfile
from sidestep.executor.speculation.proposer import make_proposer
from sidestep.ipc.transport.step import Int32, StepInput, StepMasks, StepOutput


@dataclass(slots=True)
class CpuStep:
    """A step on its way through the runner."""

    step: StepInput
    batch: HostBatch
    output: StepOutput
    stream: Tensor | None = None
    """[T, D] What the stage before has sent, and then what this stage sends."""
    sampling: Sampling | None = None
    """Set by the last stage of a model that generates text."""


class ModelRunner(StepOrder[CpuStep]):
    """A torch model on a CPU."""

    @torch.inference_mode()
    def __init__(self, args: WorkerArgs) -> None:
        super().__init__(args)
        self._stage = args.stage
        self._limits = args.scheduler.limits("cpu", self._stage.count)
        self._hidden_size = args.spec.hidden_size
        parallel = Parallel(
            args.rank_in_stage,
            args.parallel.tensor_parallel_size,
            stage=self._stage.index,
            num_stages=self._stage.count,
            rendezvous=args.rendezvous,
            listener=args.listener,
        )
        self._model = CpuModel(args, self._limits, parallel)
        self._state = HostTables(
            self._limits.num_slots,
            args.max_model_len,
            self._model.block_size,
            args.cache_groups.count,
            has_states=self._model.num_states > 0,
        )
        slots = SlotState(self._limits.num_slots, self._limits.num_drafts)
        self._pipeline = Pipeline(args, slots.table, self._limits.max_steps_in_flight)
        pools = args.spec.pooling is not None
        self.samples, proposer = self._stage.is_last and not pools, None
        if self.samples:
            proposer = make_proposer(args.scheduler.speculation, args.spec.vocab_size)
        self._drafted = DraftedRows(self._state, slots, proposer)
        self._last = (
            LastStage(args, self._limits, self._model, self._state, self._drafted)
            if self.samples
            else None
        )
        self._pooler = (
            Pooler(args.spec, self._limits.num_slots, CPU)
            if pools and self._stage.is_last
            else None
        )
        self.calls = (
            TorchProfile(args),
            SleepCalls(self._model, self.settle),
            WeightCalls(self._model, args),
            self._model,
        )
        self.ready = WorkerReady(
            num_kv_blocks=self._model.num_blocks,
            block_size=self._model.block_size,
            num_states=self._model.num_states,
            device_type="cpu",
            device=f"cpu ({torch.get_num_threads()} threads, "
            f"{str(self._model.dtype).removeprefix('torch.')})",
        )

    execute = torch.inference_mode()(StepOrder.execute)

    def _enter(self, step: StepInput) -> CpuStep:
        """Lay the step out, from its differences and what the last stage has sent before."""
        start = time.monotonic_ns()
        self._state.apply(step)
        self._pipeline.begin_step(step.beat)
        self._drafted.enter(step)
        if self._last is not None:
            self._last.special.enter(step)
        drafts = self._drafted.count(step)
        batch = make_batch(self._state, step, self._model.block_size, drafts)
        return CpuStep(step, batch, StepOutput(step.step_id, start, 0, np.empty(0, np.int32)))

    def _copy_blocks(self, sources: Int32, targets: Int32) -> None:
        self._model.attention.copy_blocks(sources, targets)

    def _copy_states(self, sources: Int32, targets: Int32) -> None:
        self._model.recurrent.copy(sources, targets)

    def _receive(self, work: CpuStep) -> None:
        if not self._stage.is_first:
            tokens = work.batch.total_tokens
            work.stream = self._pipeline.receive_stream(
                torch.empty(tokens, self._hidden_size, dtype=self._model.dtype)
            )
            work.output.start_ns = time.monotonic_ns()  # until here the stage has only waited

    def _compute(self, work: CpuStep) -> None:
        inputs = work.stream
        if inputs is None:
            inputs = torch.from_numpy(self._drafted.input_ids(work.batch))
        if self._last is not None:
            work.sampling = self._last.compute(inputs, work.batch)
        elif self._pooler is not None:
            self._pool(self._pooler, inputs, work)
        else:
            work.stream = self._model.states(inputs, work.batch, None).hidden

    def _pool(self, pooler: Pooler, inputs: Tensor, work: CpuStep) -> None:
        """Compute the last layers, and the vectors of the rows that end their prompts."""
        batch, tokens = work.batch, pooler.tokens(work.batch)
        rows = None if len(tokens) == batch.total_tokens else torch.from_numpy(tokens)
        stream = self._model.states(inputs, batch, rows)
        vectors = pooler.pool(self._model.decoder, stream, batch, work.step)
        work.output.vectors = vectors.numpy().reshape(-1)

    def _take_masks(self, work: CpuStep, masks: StepMasks) -> None:
        assert self._last is not None and work.sampling is not None
        self._last.special.masks.take(work.step, masks)
        forced = masks.forced_by_row().items()
        work.sampling.forced = {int(work.step.slots[row]): ids for row, ids in forced}

    def _sample_rest(self, work: CpuStep) -> None:
        assert self._last is not None and work.sampling is not None
        self._last.sample_rest(work.sampling, work.step, work.output)

    def _end(self, work: CpuStep) -> PendingOutput:
        work.output.end_ns = time.monotonic_ns()
        return DoneOutput(work.output)

    def _send(self, work: CpuStep) -> None:
        if not self._stage.is_last:
            assert work.stream is not None
            self._pipeline.send_stream(work.stream)
        slots = torch.from_numpy(work.step.slots.astype(np.int64))
        self._pipeline.end_step(work.step.beat, slots)

    def settle(self) -> None:
        """Do nothing: a message waits in the host's memory until the step that needs it."""

    def reset(self) -> None:
        """Forget the requests with controls; all else is overwritten when requests enter."""
        if self._last is not None:
            self._last.special.clear()
