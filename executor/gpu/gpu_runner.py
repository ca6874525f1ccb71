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

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.base import WorkerReady
from sidestep.executor.gpu.compiler_wait import wait_for_compiler
from sidestep.executor.gpu.cuda_graphs import (
    CudaGraphs,
    StepSizes,
    mixed_ladder,
    worthwhile_tokens,
)
from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.gpu.gpu_memory_calls import GpuMemoryCalls
from sidestep.executor.gpu.gpu_output import GpuOutput, SpecialOutput
from sidestep.executor.gpu.step_packer import StepPacker, masked_logits
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.models.model_loading import (
    pick_attention,
    pick_device,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch, make_batch
from sidestep.executor.runner.kv_cache_size import gpu_kv_blocks
from sidestep.executor.runner.largest_step import ALL_CONTROLS, largest_step
from sidestep.executor.runner.runner import PendingOutput, WorkerArgs
from sidestep.executor.runner.torch_profile import TakesProfiles
from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.prompt_logprobs import (
    PromptTokens,
)
from sidestep.executor.sampling.special_rows import SpecialBatch, make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import available_cores
from sidestep.ipc.model.cache_sizes import GPU_MARGIN_BYTES
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import Int64, StepInput, StepMasks
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.launch_order import checked_order
from sidestep.kernels.triton.prepare_step_triton import (
    SAMPLING,
    StepLayout,
)

_PAD = 128
"""Eager steps are padded to a multiple of this many tokens."""
_NO_IDS, _NO_ROWS = np.empty(0, np.int32), np.empty(0, np.bool_)


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
        backend = pick_attention(self._args, self._device)
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
        self._pipeline = Pipeline(args, self._tables.last_sampled, limits.max_steps_in_flight)
        if not self._stage.is_last:
            return
        self._special = make_special_rows(args, limits, device)
        self._host_ids, self._host_special_ids = self._out_ids.numpy(), self._special_ids.numpy()
        self._host_marks = self._pinned_marks.numpy()
        self._marks = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

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
        decode = [StepSizes(n, n, n, 0) for n in self._decode_sizes()]
        mixed = mixed_ladder(
            limits.max_num_seqs, limits.max_num_batched_tokens, worthwhile_tokens(self._args.spec)
        )
        with checked_order():
            for sizes in [*mixed[-1:], *mixed[:1], *decode]:
                self._launch(sizes, StepLayout(sizes.rows, sizes.tokens))
        torch.cuda.synchronize()
        # The largest first: the others then fit into the memory it took.
        for sizes in [*reversed(mixed), *reversed(decode)]:
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
        rows, tokens, decodes = len(batch.slots), batch.total_tokens, batch.num_decode_rows
        found = (
            self._graphs.find(rows, tokens)
            if self._graphs is not None and prompts is None
            else None
        )
        layout = found.layout if found is not None else self._layout
        # 2. One message to the device.
        used = self._packer.pack(position, layout, batch, step, apart)
        started, done = self._events[position]
        started.record()
        self._message[:used].copy_(self._packer.buffers[position][:used], non_blocking=True)
        if len(step.copy_sources):  # written by steps before this one, on the same stream
            self._attention.copy_blocks(step.copy_sources, step.copy_targets)
        # 3. The stream from the stage before.
        self._pipeline.begin_step(step.beat)
        if not self._stage.is_first:
            self._pipeline.receive_stream(self._hidden[:tokens])
            started.record()  # again: until here the stage has only waited
        # 4. The whole step, or this stage's part of it: inputs, model, sampling of plain rows.
        about_prompts: list[Logprobs] = []
        if found is not None:
            found.graph.replay()
        else:
            about_prompts = self._launch(
                self._eager_sizes(rows, tokens, decodes), layout, batch, prompts
            )
        # 5. The other rows, sampled from the logits that the step has left. The device is at work
        #    while the masks are made.
        more: SpecialOutput | None = None
        if self._stage.is_last:
            if step.awaits_masks and receive_masks is not None:
                self._special.masks.take(step, receive_masks())
            if apart is not None and len(apart.masked):
                self._sample_masked(batch, apart.masked, position, layout)
            more = self._run_special(batch, apart, position, about_prompts)
        done.record()
        # 6. The stream to the stage after, and the ids to the first stage.
        if not self._stage.is_last:
            self._pipeline.send_stream(self._hidden[:tokens].clone())
        if self._stage.count > 1:
            at = layout.at("slots")
            self._pipeline.end_step(step.beat, self._message[at : at + rows].long())
        ids, samples = (
            (self._host_ids[position], batch.samples)
            if self._stage.is_last
            else (_NO_IDS, _NO_ROWS)
        )
        return GpuOutput(step.step_id, ids, samples, more, started, done, self._clock)

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
        return self._special.find(batch), self._special.find_prompts(batch)

    def _sample_masked(
        self, batch: HostBatch, rows: Int64, position: int, layout: StepLayout
    ) -> None:
        """Sample plain rows that had to wait for their masks.

        The step's message still holds what else is needed, so this takes one small copy and three
        kernels. A mark holds both the row's mask index and that the row samples.
        """
        count, message = len(batch.slots), self._message
        marks, on_device = self._host_marks[position], self._marks[:count]
        marks[:count] = 0
        marks[rows] = self._special.masks.marks(batch.slots[rows])
        on_device.copy_(self._pinned_marks[position, :count], non_blocking=True)
        logits = self._logits[:count, : self._args.spec.vocab_size]
        self._special.masks.mask(logits, on_device)
        slots, seq_lens = (
            message[layout.at(name) : layout.at(name) + count] for name in ("slots", "seq_lens")
        )
        self._sample(logits, message[SAMPLING:], slots, seq_lens, on_device, self._out_ids)

    def _run_special(
        self, batch: HostBatch, apart: Apart | None, position: int, about_prompts: list[Logprobs]
    ) -> SpecialOutput | None:
        """Sample the step's special rows; None if it has none and no logprobs of prompts."""
        rows, logprobs = np.empty(0, np.int64) if apart is None else apart.special, list[Logprobs]()
        if not len(rows) and not about_prompts:
            return None
        if len(rows):
            logits = self._logits[: len(batch.slots), : self._args.spec.vocab_size]
            logprobs = self._special.run(
                logits,
                batch,
                rows,
                rows,
                lambda wide, part: self._sample_special(wide, part, position),
            )
        return SpecialOutput(
            rows, self._host_special_ids[position, : len(rows)], logprobs, about_prompts
        )

    def _sample_special(self, logits: Tensor, part: SpecialBatch, position: int) -> Tensor:
        """Sample special rows as plain rows are sampled."""
        count = len(part.slots)
        columns = np.ones((4, -(-count // 4) * 4), np.int32)  # aligned to 16 bytes, as compiled for
        columns[0, :2] = (count, position)
        columns[1, :count], columns[2, :count] = part.slots, part.seq_lens
        header, slots, seq_lens, samples = to_device(columns, self._device)
        masked_rows, masked_tokens = masked_logits(self._state, part.slots, part.seq_lens)
        if len(masked_rows):
            masked = to_device(
                np.stack((masked_rows, masked_tokens)).astype(np.int64), self._device
            )
            logits.index_put_((masked[0], masked[1]), logits.new_tensor(-torch.inf))
        # The pinned row of this step, from the end of the rows of earlier parts; that is aligned
        # too.
        self._sample(logits, header, slots, seq_lens, samples, self._special_ids[:, part.first :])
        return self._tables.last_sampled.index_select(0, part.slot_index).long()

    def _eager_sizes(self, rows: int, tokens: int, decodes: int) -> StepSizes:
        """Return the sizes of a step without a graph, padded to few different sizes.

        For a new size the library of products may choose a kernel that it has not loaded yet, which
        stops the device, and the allocator may have to look for memory. A backend that works from
        the host's view takes no padding.
        """
        if not self._attention.graph_safe:
            return StepSizes(rows, tokens, decodes, rows - decodes)
        padded = next(size for size in self._decode_sizes() if size >= rows)
        if decodes == tokens:
            return StepSizes(padded, padded, padded, 0)
        return StepSizes(
            padded, min(-(-tokens // _PAD) * _PAD, self._layout.tokens), decodes, rows - decodes
        )
