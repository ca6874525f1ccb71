"""Run a model's steps on a GPU: pack a step, launch it, and never wait for it.

Order of side effects in `execute`: the step's differences are applied to the host's tables and
packed. One copy takes the message to the device. Block copies and then the kernels of the step
follow on the same stream, most often as one captured graph. So steps run in the order they came,
and the copy of one step's message waits until the step before has read its own. Sampled ids stay on
the device for the next step. The last kernel also writes them to pinned memory, where the thread
that waits for the step's event finds them. Special rows (executor/sampling/special_rows.py) are
sampled after that, before the event.

In a pipeline the same holds for each stage's own part. The stream from another stage is received
right before it is needed and on the same stream of kernels, so that the kernel that waits for it
disturbs no other. The stream to another stage is sent from a copy, on a CUDA stream of its own,
while the next step runs. Graphs lie between the two.

The kernels of a step, and the memory that they need, are in executor/gpu/step_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.base import WorkerReady
from sidestep.executor.gpu.apart_rows import ApartRows, QueryLogprobs
from sidestep.executor.gpu.compiler_wait import wait_for_compiler
from sidestep.executor.gpu.cuda_graphs import (
    CudaGraphs,
    StepSizes,
    draft_sizes,
    mixed_ladder,
    most_queries,
    worthwhile_tokens,
)
from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.gpu.gpu_memory_calls import GpuMemoryCalls
from sidestep.executor.gpu.gpu_output import GpuOutput, StepResult
from sidestep.executor.gpu.step_packer import StepPacker
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.models.model_loading import pick_device
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch, make_batch
from sidestep.executor.runner.kv_cache_size import gpu_kv_blocks
from sidestep.executor.runner.largest_step import ALL_CONTROLS, largest_step
from sidestep.executor.runner.runner import PendingOutput, WorkerArgs
from sidestep.executor.runner.torch_profile import TakesProfiles
from sidestep.executor.runner.transfer import to_device, to_host
from sidestep.executor.sampling.prompt_logprobs import PromptTokens
from sidestep.executor.sampling.special_rows import make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import available_cores
from sidestep.ipc.model.cache_sizes import GPU_MARGIN_BYTES
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import StepInput, StepMasks
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.launch_order import checked_order
from sidestep.kernels.triton.prepare_step_triton import NUM_DRAFTS, StepLayout

_PAD = 128
"""Eager steps are padded to a multiple of this many tokens."""


class GpuRunner(TakesProfiles, GpuMemoryCalls):
    """A torch model on one NVIDIA GPU."""

    def __init__(self, args: WorkerArgs) -> None:
        self._prepare(args, pick_device(args))
        torch.cuda.set_device(self._device)
        self._parallel = Parallel(
            args.rank_in_stage,
            args.parallel.tensor_parallel_size,
            stage=self._stage.index,
            num_stages=self._stage.count,
            rendezvous=args.rendezvous,
            cuda=True,
        )

    def _prepare(self, args: WorkerArgs, device: torch.device) -> None:
        """Set what needs no GPU."""
        super()._prepare(args, device)
        self._num_steps = 0
        self._graphs: CudaGraphs | None = None

    # Loading.

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        """Load the weights, allocate the KV cache and capture the graphs."""
        backend = self._pick_attention()
        try:
            self._open_peer_sums()
            self._make_tables()
            self._make_buffers()
            self._load_model()
            num_blocks = self._size_cache(backend)
            self._attention = self._make_attention(backend, num_blocks)
            self._make_ready()
        except torch.OutOfMemoryError as error:
            raise EngineStartError(
                "gpu_memory_utilization: the GPU has too little memory: "
                f"{str(error).splitlines()[0]} Lower "
                "kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, stop other "
                "programs on this GPU, or "
                "use a larger tensor_parallel_size or pipeline_parallel_size"
            ) from None
        torch.cuda.synchronize()
        return WorkerReady(
            num_kv_blocks=num_blocks,
            block_size=self._block_size,
            device_type="cuda",
            device=torch.cuda.get_device_name(self._device),
        )

    def _make_ready(self) -> None:
        """Forget all requests and capture the graphs, with the cache and the weights in place."""
        self._reset()
        if self._attention.graph_safe and not self._args.parallel.enforce_eager:
            self._graphs = self._capture()

    def _make_buffers(self) -> None:
        """Allocate the buffers in the host's memory, and what only a GPU has."""
        args, limits, device = self._args, self._limits, self._device
        self._packer = StepPacker(self._layout, self._tables.block_tables.shape[1], self._rotation)
        self._events = [
            (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True, blocking=True),
            )
            for _ in range(self._rotation)
        ]
        self._clock = DeviceClock()
        self._pipeline = Pipeline(args, self._tables.progress, limits.max_steps_in_flight)
        if self._stage.is_last:
            self._special = make_special_rows(args, limits, device)
            self._apart = ApartRows(
                self._special, self._sampler, self._tables, self._rotation, most_queries(limits)
            )

    def _reset(self) -> None:
        """Forget all requests."""
        self._state = HostTables(self._limits.num_slots, self._args.max_model_len, self._block_size)
        self._message.zero_()

    def _size_cache(self, backend: type[AttentionBackend]) -> int:
        """Run the largest step, and return the number of KV blocks that fit beside it.

        The step runs on a cache of one block. All stages of a pipeline do so together: they send
        each other the same messages as in any step.
        """
        shape = attention_shape(self._args.spec, self._parallel, self._stage)
        self._attention = self._make_attention(backend, 1)
        if backend.graph_safe:
            wait_for_compiler(self._args.compiled)
            # The kernels that it has not compiled are compiled here, side by side.
            sharing = self._args.parallel.num_ranks * self._args.parallel.data_parallel_size
            num_threads = max(1, available_cores() // sharing)
            with CompilerThreads(num_threads) as threads, compiling_only(threads):
                self._launch_all()
            self._model.warm_up(range(_PAD, self._limits.max_num_batched_tokens + 1, _PAD))
        self._reset()
        # The plain step comes last: it takes the slots of the requests with controls, so nothing is
        # kept for those afterwards.
        controlled, working = (
            self._working_bytes(controls) for controls in (ALL_CONTROLS, Controls())
        )
        del self._attention
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Graphs keep a pool of their own, which the largest of them fills like a step outside of
        # graphs.
        graphs = 0 if self._args.parallel.enforce_eager or not backend.graph_safe else working
        # One copy of the stream is in `working`; each further step in flight may have one more.
        sent = 0 if self._stage.is_last else self._hidden.nbytes * self._limits.max_steps_in_flight
        blocks = gpu_kv_blocks(
            self._args,
            self._limits,
            shape.bytes_per_token(self._dtype),
            self._block_size,
            free=free,
            total=total,
            working=max(controlled, working) + graphs + sent + GPU_MARGIN_BYTES,
        )
        # Block ids are common to all ranks, so the rank with the least room decides.
        return self._parallel.minimum(blocks)

    def _working_bytes(self, controls: Controls) -> int:
        """Return the bytes that the largest step takes, with these controls in each row."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = self.execute(
            largest_step(self._limits, self._args.max_model_len, self._block_size, controls)
        )
        self.settle()
        step.wait()
        return torch.cuda.max_memory_allocated() - before

    def _capture(self) -> CudaGraphs:
        """Run each kind of step once on no rows, then capture the ladder."""
        limits = self._limits
        graphs = CudaGraphs(self._launch)
        decode = [StepSizes(n, n, n, 0) for n in self._decode_sizes()] + draft_sizes(limits)
        mixed = mixed_ladder(
            limits.max_num_seqs, limits.max_num_batched_tokens, worthwhile_tokens(self._args.spec)
        )
        with checked_order():
            for sizes in [*mixed[-1:], *mixed[:1], *decode]:
                self._launch(sizes, sizes.layout)
        torch.cuda.synchronize()
        # The largest first: the others then fit into the memory it took.
        for sizes in sorted((*mixed, *decode), key=lambda s: -s.tokens):
            graphs.capture(sizes)
        return graphs

    # Steps.

    @torch.inference_mode()
    def execute(
        self, step: StepInput, receive_masks: Callable[[], StepMasks] | None = None
    ) -> PendingOutput:
        """Launch a step and return its output to be waited for."""
        position = self._num_steps % self._rotation
        self._num_steps += 1
        # 1. Apply the differences and lay this step's tokens out.
        self._state.apply(step)
        batch = make_batch(self._state, step, self._block_size)
        apart, prompts = self._find_special(step, batch)
        rows, queries = len(batch.slots), 1 + step.num_drafts
        tokens = batch.total_tokens * queries
        found = (
            self._graphs.find(rows, tokens, queries)
            if self._graphs is not None and prompts is None
            else None
        )
        layout = found.layout if found is not None else self._layout
        # 2. One message to the device.
        used = self._packer.pack(position, layout, batch, step, apart)
        started, done = self._events[position]
        started.record()
        self._message[:used].copy_(self._packer.buffers[position][:used], non_blocking=True)
        self._store_past(step)
        if len(step.copy_sources):  # written by steps before this one, on the same stream
            self._attention.copy_blocks(step.copy_sources, step.copy_targets)
        # 3. The stream from the stage before.
        self._pipeline.begin_step(step.beat)
        if not self._stage.is_first:
            self._pipeline.receive_stream(self._hidden[:tokens])
            started.record()  # again: until here the stage has only waited
        # 4. The whole step, or this stage's part of it: inputs, model, sampling of plain rows.
        if self._stage.is_last:
            self._sampler.begin_step(position, rows)
        about_prompts: list[Logprobs] = []
        if found is not None:
            found.graph.replay()
        else:
            sizes = self._eager_sizes(rows, batch.total_tokens, batch.num_decode_rows, queries)
            about_prompts = self._launch(sizes, layout, batch, prompts)
        # 5. The other rows, sampled from the logits that the step has left. The device is at work
        #    while the masks are made.
        result: StepResult | None = None
        if self._stage.is_last:
            masks = receive_masks() if step.awaits_masks and receive_masks is not None else None
            if masks is not None:
                self._special.masks.take(step, masks)
            result = self._sample_apart(
                batch, apart, masks, position, layout, about_prompts, 1 + step.num_drafts
            )
        done.record()
        # 6. The stream to the stage after, and the slots' progress to the stages before.
        if not self._stage.is_last:
            self._pipeline.send_stream(self._hidden[:tokens].clone())
        if self._stage.count > 1:
            at = layout.at("slots")
            self._pipeline.end_step(step.beat, self._message[at : at + rows].long())
        return GpuOutput(step.step_id, result, started, done, self._clock)

    @torch.inference_mode()
    def settle(self) -> None:
        """Receive what other stages have sent."""
        self._pipeline.settle()

    def _find_special(
        self, step: StepInput, batch: HostBatch
    ) -> tuple[Apart | None, PromptTokens | None]:
        """Return the rows that are sampled apart, and prompt tokens with requested logprobs.

        Only the last stage has any.
        """
        if not self._stage.is_last:
            return None, None
        self._special.enter(step)
        if self._limits.num_drafts and len(step.entering):
            slots = step.entering["slot"]
            self._state.records["max_drafts"][slots[self._special.without_drafts[slots]]] = 0
        return self._special.find(batch), self._special.find_prompts(batch)

    def _store_past(self, step: StepInput) -> None:
        """Store tokens that a request enters with in the cache, where drafts are looked up.

        The others are stored when they are computed.
        """
        if not self._tables.tokens.numel() or not len(step.entering):
            return
        computed = step.entering["num_computed"].tolist()
        for (slot, sent, *_), count in zip(step.entering_rows(), computed, strict=True):
            if count:
                past = self._state.token_ids[slot, :count].copy()
                past[: sent.start] = -1  # not sent
                self._tables.tokens[slot, :count].copy_(to_device(past, self._device))

    def _sample_apart(
        self,
        batch: HostBatch,
        apart: Apart | None,
        masks: StepMasks | None,
        position: int,
        layout: StepLayout,
        about_prompts: list[Logprobs],
        queries: int,
    ) -> StepResult:
        """Sample the rows that the step has left out; return where all of its results will be."""
        count = len(batch.slots)
        rows = self._columns.step_rows(self._message, layout, count, queries)
        logprobs: list[QueryLogprobs] = []
        if apart is not None:
            logits = self._logits[: count * queries, : self._args.spec.vocab_size]
            logprobs = self._apart.run(logits, batch, apart, rows, position)
        drafts = None
        if self._sampler.speculates and masks is not None:  # the next masks depend on them
            self._apart.force_drafts(masks.forced_by_row(), rows)
            progress = self._tables.progress.index_select(0, rows.slots)
            drafts = to_host(progress[:, NUM_DRAFTS:].contiguous())
        return StepResult(
            self._sampler, position, batch.samples, queries, logprobs, about_prompts, drafts
        )

    def _eager_sizes(self, rows: int, tokens: int, decodes: int, queries: int) -> StepSizes:
        """Return the sizes of a step without a graph, padded to few different sizes.

        tokens: without drafts. For a new size the library of products may choose a kernel that it
        has not loaded yet, which stops the device, and the allocator may have to look for memory. A
        backend that works from the host's view takes no padding.
        """
        if not self._attention.graph_safe:
            return StepSizes(rows, tokens, decodes, rows - decodes)
        if queries > 1:
            return next(
                sizes
                for sizes in draft_sizes(self._limits)
                if sizes.queries == queries and sizes.rows >= rows
            )
        padded = next(size for size in self._decode_sizes() if size >= rows)
        if decodes == tokens:
            return StepSizes(padded, padded, padded, 0)
        return StepSizes(
            padded, min(-(-tokens // _PAD) * _PAD, self._layout.tokens), decodes, rows - decodes
        )
