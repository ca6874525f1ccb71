"""Run a model's steps on a GPU: pack a step, launch it, and never wait for it.

Order of side effects in a step (see executor/runner/step_order.py): the step's differences are
applied to the host's tables and packed. One copy takes the message to the device. Block copies and
then the kernels of the step follow on the same stream, most often as one captured graph. So steps
run in the order they came, and the copy of one step's message waits until the step before has read
its own. Sampled ids stay on the device for the next step. The last kernel also writes them to
pinned memory, where the thread that waits for the step's event finds them. Rows with masks and
special rows (executor/gpu/apart_rows.py) are sampled after that, before the event.

With speculation the host does not know how many tokens a row has that decodes: its own count
(HostTables.num_computed) has one token for each step, which is the fewest. The count of the slot
itself, on the device, is what kernels go by.

In a pipeline the same holds for each stage's own part. The stream from another stage is received
right before it is needed and on the same stream of kernels, so that the kernel that waits for it
disturbs no other. The stream to another stage is sent from a copy, on a CUDA stream of its own,
while the next step runs. Graphs lie between the two.

The kernels of a step are in executor/gpu/step_kernels.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from sidestep.executor.base import WorkerReady
from sidestep.executor.gpu.cuda_graphs import StepGraph, StepSizes, eager_sizes
from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.gpu.device_tables import place_blocks
from sidestep.executor.gpu.gpu_model import GpuModel
from sidestep.executor.gpu.gpu_output import GpuOutput, PooledResult, StepResult
from sidestep.executor.gpu.gpu_setup import GpuSetup, StepMemory
from sidestep.executor.gpu.last_stage import LastStage
from sidestep.executor.gpu.step_kernels import StepKernels
from sidestep.executor.gpu.step_packer import StepPacker
from sidestep.executor.models.model_loading import pick_device
from sidestep.executor.models.new_weights import WeightCalls
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.pooling.pooler import Pooler
from sidestep.executor.recurrent.state_words import FEW_SAVES
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch, make_batch
from sidestep.executor.runner.runner import PendingOutput, WorkerArgs
from sidestep.executor.runner.sleep import SleepCalls
from sidestep.executor.runner.step_order import StepOrder
from sidestep.executor.runner.torch_profile import TorchProfile
from sidestep.executor.runner.transfer import to_device, to_host
from sidestep.executor.sampling.prompt_logprobs import PromptTokens
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.transport.step import Int32, StepInput, StepMasks
from sidestep.kernels.quick_launch import launch_quickly
from sidestep.kernels.triton.prepare_step_triton import StepLayout


@dataclass(slots=True)
class GpuStep:
    """A step on its way through the runner."""

    step: StepInput
    batch: HostBatch
    queries: int
    """Tokens of each row, if the step has drafts; else 1."""
    position: int
    """Index of the step's buffers."""
    kernels: StepKernels
    graph: StepGraph | None
    layout: StepLayout
    """Layout of the step's message."""
    apart: Apart | None
    prompts: PromptTokens | None
    about_prompts: list[Logprobs] = field(default_factory=list)
    masks: StepMasks | None = None
    result: StepResult | PooledResult | None = None
    """None in a stage that is not the last."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the residual stream."""
        return self.batch.total_tokens * self.queries


class GpuRunner(StepOrder[GpuStep]):
    """A torch model on one NVIDIA GPU."""

    @torch.inference_mode()
    def __init__(self, args: WorkerArgs) -> None:
        super().__init__(args)
        device = pick_device(args)
        torch.cuda.set_device(device)
        launch_quickly()
        setup = self._setup = GpuSetup(args, device)
        self._stage = setup.stage
        parallel = Parallel(
            args.rank_in_stage,
            args.parallel.tensor_parallel_size,
            stage=self._stage.index,
            num_stages=self._stage.count,
            rendezvous=args.rendezvous,
            listener=args.listener,
            cuda=device.type == "cuda",
        )
        with _memory_errors():
            setup.open_peer_sums(parallel)
            memory = self._memory = StepMemory(setup)
            self._packer = StepPacker(
                memory.layout, memory.max_blocks, setup.rotation, memory.states
            )
            self._events = [
                (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True, blocking=True),
                )
                for _ in range(setup.rotation)
            ]
            self._clock = DeviceClock()
            self._pipeline = Pipeline(
                args, memory.tables.progress, setup.limits.max_steps_in_flight
            )
            self._last = LastStage(setup, memory) if setup.samples else None
            self._pooler = (
                Pooler(args.spec, setup.limits.num_slots, device)
                if self._stage.is_last and not setup.samples
                else None
            )
            self.samples = setup.samples
            self._state = HostTables(
                setup.limits.num_slots,
                args.max_model_len,
                setup.block_size,
                args.cache_groups.count,
                has_states=setup.has_states,
            )
            self._num_steps = 0
            self._model = GpuModel(setup, memory, parallel)
            self._model.size_cache(self._run)
        self.calls = (
            TorchProfile(args),
            SleepCalls(self._model, self.settle),
            WeightCalls(self._model, args),
            self._model,
        )
        self.ready = WorkerReady(
            num_kv_blocks=self._model.num_blocks,
            block_size=setup.block_size,
            num_states=self._model.num_states,
            device_type="cuda",
            device=torch.cuda.get_device_name(device),
        )

    def _run(self, step: StepInput) -> None:
        """Run a step to its end."""
        pending = self.execute(step)
        self.settle()
        pending.wait()

    execute = torch.inference_mode()(StepOrder.execute)

    def _enter(self, step: StepInput) -> GpuStep:
        """Lay the step out, and copy its message to the device."""
        memory, graphs, kernels = self._memory, self._model.graphs, self._model.kernels
        assert kernels is not None, "the rank sleeps"
        position = self._num_steps % self._setup.rotation
        self._num_steps += 1
        self._state.apply(step)
        batch = make_batch(self._state, step, self._setup.block_size)
        apart, prompts = self._last.find(step, batch) if self._last is not None else (None, None)
        queries = 1 + step.num_drafts
        graph = None
        if graphs is not None and prompts is None and not _has_many_saves(batch):
            graph = graphs.find(len(batch.slots), batch.total_tokens * queries, queries)
            if graph is not None and kernels.pays_in_parts(graph.sizes, batch):
                graph = graphs.in_parts(graph)
        layout = graph.layout if graph is not None else memory.layout
        used = self._packer.pack(position, layout, batch, step, apart)
        self._events[position][0].record()
        memory.words[:used].copy_(self._packer.buffers[position][:used], non_blocking=True)
        place_blocks(memory.tables.block_tables, step)
        self._store_past(step)
        return GpuStep(step, batch, queries, position, kernels, graph, layout, apart, prompts)

    def _copy_blocks(self, sources: Int32, targets: Int32) -> None:
        kernels = self._model.kernels
        assert kernels is not None
        kernels.attention.copy_blocks(sources, targets)

    def _copy_states(self, sources: Int32, targets: Int32) -> None:
        kernels = self._model.kernels
        assert kernels is not None and kernels.recurrent is not None
        kernels.recurrent.copy(sources, targets)

    def _receive(self, work: GpuStep) -> None:
        self._pipeline.begin_step(work.step.beat)
        if not self._stage.is_first:
            self._pipeline.receive_stream(self._memory.hidden[: work.num_tokens])
            self._events[work.position][0].record()  # again: until here the stage has only waited

    def _compute(self, work: GpuStep) -> None:
        """Launch the whole step, or this stage's part of it: inputs, model, plain rows' tokens."""
        batch, limits = work.batch, self._setup.limits
        rows, decodes = len(batch.slots), batch.num_decode_rows
        if self._last is not None:
            self._last.sampler.begin_step(work.position, rows)
        if work.graph is not None:
            work.graph.graph.replay()
            return
        sizes = (
            eager_sizes(limits, rows, batch.total_tokens, decodes, work.queries)
            if self._setup.backend.graph_safe
            else StepSizes(rows, work.num_tokens, decodes, rows - decodes)
        )
        sizes = replace(
            sizes,
            in_parts=work.kernels.pays_in_parts(sizes, batch),
            has_many_saves=_has_many_saves(batch),
        )
        if self._pooler is not None:
            self._pool(self._pooler, work, sizes)
        else:
            work.about_prompts = work.kernels.launch(sizes, work.layout, batch, work.prompts)

    def _pool(self, pooler: Pooler, work: GpuStep, sizes: StepSizes) -> None:
        """Launch a step of a model that pools, and the copy of its vectors to the host."""
        batch = work.batch
        stream = work.kernels.states(sizes, work.layout, batch, of_rows=pooler.of_last)
        at = batch.sampling_rows if pooler.of_last else pooler.tokens(batch)
        vectors = pooler.pool(work.kernels.model.decoder, stream, batch, work.step, at)
        work.result = PooledResult(to_host(vectors))

    def _take_masks(self, work: GpuStep, masks: StepMasks) -> None:
        assert self._last is not None
        self._last.special.masks.take(work.step, masks)
        work.masks = masks

    def _sample_rest(self, work: GpuStep) -> None:
        """Launch the sampling of the other rows, from the logits that the step has left."""
        assert self._last is not None
        work.result = self._last.sample(
            work.kernels.model.logits,
            work.batch,
            work.apart,
            work.masks,
            self._memory.columns.step_rows(
                self._memory.message, work.layout, len(work.batch.slots), work.queries
            ),
            work.position,
            work.about_prompts,
        )

    def _end(self, work: GpuStep) -> PendingOutput:
        started, done = self._events[work.position]
        done.record()
        return GpuOutput(work.step.step_id, work.result, started, done, self._clock)

    def _send(self, work: GpuStep) -> None:
        if self._stage.count == 1:
            return
        if not self._stage.is_last:
            self._pipeline.send_stream(self._memory.hidden[: work.num_tokens].clone())
        at = work.layout.at("slots")
        slots = self._memory.message[at : at + len(work.batch.slots)].long()
        self._pipeline.end_step(work.step.beat, slots)

    @torch.inference_mode()
    def settle(self) -> None:
        """Receive what other stages have sent."""
        self._pipeline.settle()

    @torch.inference_mode()
    def reset(self) -> None:
        """Wait for the device, and forget the requests with controls.

        All else is overwritten when requests enter. Memory that no tensor has is given back, since
        a step may have failed for want of a piece of another size. Raises what the device reports
        if it is broken.
        """
        torch.cuda.synchronize()
        if self._last is not None:
            self._last.special.clear()
        gc.collect()
        torch.cuda.empty_cache()

    def _store_past(self, step: StepInput) -> None:
        """Store tokens that a request enters with in the cache, where drafts are looked up.

        The others are stored when they are computed.
        """
        if not self._memory.tables.tokens.numel() or not len(step.entering):
            return
        computed = step.entering["num_computed"].tolist()
        for (slot, sent, *_), count in zip(step.entering_rows(), computed, strict=True):
            if count:
                past = self._state.token_ids[slot, :count].copy()
                past[: sent.start] = -1  # not sent
                self._memory.tables.tokens[slot, :count].copy_(to_device(past, self._setup.device))


def _has_many_saves(batch: HostBatch) -> bool:
    """Return whether a step saves more states than the kernels of its graph may."""
    return len(batch.saves.targets) > FEW_SAVES


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Say to the user, by EngineStartError, what helps where the GPU has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineStartError(
            "gpu_memory_utilization: the GPU has too little memory: "
            f"{str(error).splitlines()[0]} Lower "
            "kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, stop other "
            "programs on this GPU, or "
            "use a larger tensor_parallel_size or pipeline_parallel_size"
        ) from None
