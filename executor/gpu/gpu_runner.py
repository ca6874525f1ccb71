"""Runs a model's steps on a GPU: packs a step, launches it, and never waits for it.

Order of side effects in `execute`: the step's differences are applied to the host's tables and
packed; one copy takes the message to the device; block copies and then the kernels of the step
follow on the same stream, most often as one captured graph. So steps run in the order they came,
and the copy of one step's message waits until the step before has read its own. Sampled ids stay on
the device for the next step; the last kernel also writes them to pinned memory, where whoever waits
for the step's event finds them. Special rows (executor/sampling/special_rows.py) are sampled after
that, before the event.

In a pipeline the same holds of each stage's own part. What comes from another stage is received
right before it is needed and on the same stream, so that the kernel that waits for it disturbs no
other; what goes to another stage is sent from a copy, on a stream of its own, while the next step
runs. Graphs lie between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, DeviceRows, StepBatch
from sidestep.executor.base import WorkerReady
from sidestep.executor.gpu.compiler_wait import wait_for_compiler
from sidestep.executor.gpu.cuda_graphs import (
    CudaGraphs,
    StepSizes,
    decode_ladder,
    mixed_ladder,
    worthwhile_tokens,
)
from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.gpu.gpu_output import GpuOutput, SpecialOutput
from sidestep.executor.gpu.step_packer import StepPacker, masked_logits, message_size
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.models.model_loading import (
    load_model,
    load_rotary,
    pick_attention,
    pick_device,
    pick_dtype,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.parallel.pipeline import Pipeline
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import Apart, HostBatch, make_batch
from sidestep.executor.runner.kv_cache_size import gpu_kv_blocks
from sidestep.executor.runner.largest_step import ALL_CONTROLS, largest_step
from sidestep.executor.runner.runner import PendingOutput, Runner, WorkerArgs
from sidestep.executor.runner.transfer import to_device
from sidestep.executor.sampling.prompt_logprobs import (
    PromptTokens,
    prompt_logprobs,
    with_prompt_tokens,
)
from sidestep.executor.sampling.special_rows import SpecialBatch, make_special_rows
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import available_cores
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import Int64, StepInput, StepMasks
from sidestep.kernels.compiling import CompilerThreads, compiling_only
from sidestep.kernels.launch import has_pdl
from sidestep.kernels.ops.token_masks import mask_tokens
from sidestep.kernels.triton.mask_logits_triton import mask_logits
from sidestep.kernels.triton.prepare_step_triton import (
    HEADER,
    MASKED,
    SAMPLING,
    SlotTables,
    StepLayout,
    prepare_step,
)
from sidestep.kernels.triton.sampling_triton import sample_tokens, scratch_size

_BLOCK_SIZE = 64
_PAD = 128
"""Eager steps are filled up to a multiple of this many tokens."""
_MARGIN = 512 << 20
"""Bytes left to the driver, to graphs and to libraries' own buffers."""
_NO_IDS, _NO_ROWS = np.empty(0, np.int32), np.empty(0, np.bool_)


class GpuRunner(Runner):
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
        """What needs no GPU."""
        self._args = args
        self._stage = args.stage
        self._device = device
        self._dtype = pick_dtype(args, device)
        self._block_size = args.cache.block_size or _BLOCK_SIZE
        if self._block_size % 16:
            raise EngineStartError(
                f"block_size: must be a multiple of 16 on a GPU, not {self._block_size}"
            )
        self._limits = args.scheduler.limits("cuda", self._stage.count)
        self._rotation = self._limits.max_steps_in_flight + 2
        self._num_steps = 0
        self._graphs: CudaGraphs | None = None

    # Loading.

    @torch.inference_mode()
    def load(self) -> WorkerReady:
        backend = pick_attention(self._args, self._device)
        try:
            self._open_peer_sums()
            self._make_tables()
            self._make_buffers()
            self._load_model()
            num_blocks = self._size_cache(backend)
            self._attention = self._make_attention(backend, num_blocks)
            self._reset()
            if backend.graph_safe and not self._args.parallel.enforce_eager:
                self._graphs = self._capture()
        except torch.OutOfMemoryError as error:
            raise EngineStartError(
                f"gpu_memory_utilization: the GPU has too little memory: {str(error).splitlines()[0]} Lower "
                "kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, stop other programs on this GPU, or "
                "use a larger tensor_parallel_size or pipeline_parallel_size"
            ) from None
        torch.cuda.synchronize()
        return WorkerReady(
            num_kv_blocks=num_blocks,
            block_size=self._block_size,
            device_type="cuda",
            device=torch.cuda.get_device_name(self._device),
        )

    def _open_peer_sums(self) -> None:
        if not self._args.parallel.disable_custom_all_reduce:
            self._parallel.open_peer_sums(
                self._args.spec.hidden_size,
                self._dtype,
                self._limits.max_num_batched_tokens,
                self._device,
            )

    def _load_model(self) -> None:
        self._model = load_model(self._args, self._parallel, self._dtype, self._device)
        self._rotary = load_rotary(self._args, self._device)
        if self._stage.is_last:
            self._logits = self._model.new_logits(self._limits.max_num_seqs)

    def _make_tables(self) -> None:
        args, limits, device = self._args, self._limits, self._device
        slots = limits.num_slots
        max_blocks = -(-args.max_model_len // self._block_size)
        self._layout = StepLayout(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._message = torch.zeros(
            message_size(self._layout, max_blocks), dtype=torch.int32, device=device
        )
        self._tables = SlotTables(
            block_tables=torch.zeros(slots, max_blocks, dtype=torch.int32, device=device),
            last_sampled=torch.zeros(slots, dtype=torch.int32, device=device),
            temperature=torch.zeros(slots, device=device),
            top_p=torch.ones(slots, device=device),
            min_p=torch.zeros(slots, device=device),
            top_k=torch.zeros(slots, dtype=torch.int32, device=device),
            seed=torch.zeros(slots, dtype=torch.int64, device=device),
        )
        tokens = limits.max_num_batched_tokens if self._stage.count > 1 else 0
        self._hidden = torch.zeros(tokens, args.spec.hidden_size, dtype=self._dtype, device=device)
        """The residual stream, as it comes from the stage before and goes to the next."""
        if self._stage.is_last:
            self._make_sampler()

    def _make_sampler(self) -> None:
        args, limits, device = self._args, self._limits, self._device
        self._scratch = torch.empty(
            scratch_size(limits.max_num_seqs, args.spec.vocab_size),
            dtype=torch.int32,
            device=device,
        )
        self._out_ids, self._special_ids, self._pinned_marks = (
            self._pinned(limits.max_num_seqs) for _ in range(3)
        )

    def _pinned(self, count: int) -> Tensor:
        """int32 [rotation, count] in memory of the host that the GPU reads and writes too."""
        where: dict[str, Any] = (
            {"pin_memory": True} if self._device.type == "cuda" else {"device": self._device}
        )
        return torch.zeros(self._rotation, count, dtype=torch.int32, **where)

    def _make_buffers(self) -> None:
        """What lies in the host's memory, and what only a GPU has."""
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

    def _make_attention(self, backend: type[AttentionBackend], num_blocks: int) -> AttentionBackend:
        return backend(
            AttentionSetup(
                shape=attention_shape(self._args.spec, self._parallel, self._stage),
                num_blocks=num_blocks,
                block_size=self._block_size,
                dtype=self._dtype,
                device=self._device,
                rotary=self._rotary,
                norm_eps=self._args.spec.rms_norm_eps,
                max_rows=self._limits.max_num_seqs,
            )
        )

    def _reset(self) -> None:
        """No request has been seen."""
        self._state = HostTables(self._limits.num_slots, self._args.max_model_len, self._block_size)
        self._message.zero_()

    def _size_cache(self, backend: type[AttentionBackend]) -> int:
        """Runs the largest step on a cache of one block, and gives the cache what that leaves. All
        stages of a pipeline do so together: they send each other what any step does.
        """
        shape = attention_shape(self._args.spec, self._parallel, self._stage)
        self._attention = self._make_attention(backend, 1)
        if backend.graph_safe:
            wait_for_compiler(self._args.compiled)
            # What it has not compiled is compiled here, all kernels side by side.
            sharing = self._args.parallel.num_ranks * self._args.parallel.data_parallel_size
            num_threads = max(1, available_cores() // sharing)
            with CompilerThreads(num_threads) as threads, compiling_only(threads):
                self._launch_all()
            self._model.warm_up(range(_PAD, self._limits.max_num_batched_tokens + 1, _PAD))
        self._reset()
        # The plain step comes last: it takes the slots of those with controls, of which nothing is
        # left then.
        controlled, working = (
            self._working_bytes(controls) for controls in (ALL_CONTROLS, Controls())
        )
        del self._attention
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        # Graphs keep a pool of their own, which the largest of them fills like a step outside of
        # graphs.
        graphs = 0 if self._args.parallel.enforce_eager or not backend.graph_safe else working
        # One copy of the stream is in `working`; of each further step in flight there may be one
        # more.
        sent = 0 if self._stage.is_last else self._hidden.nbytes * self._limits.max_steps_in_flight
        blocks = gpu_kv_blocks(
            self._args,
            self._limits,
            shape.bytes_per_token(self._dtype),
            self._block_size,
            free=free,
            total=total,
            working=max(controlled, working) + graphs + sent + _MARGIN,
        )
        # Block ids are common to all ranks, so the rank with the least room decides.
        return self._parallel.minimum(blocks)

    def _working_bytes(self, controls: Controls) -> int:
        """What the largest step takes, with these controls in each row."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step = self.execute(
            largest_step(self._limits, self._args.max_model_len, self._block_size, controls)
        )
        self.settle()
        step.wait()
        return torch.cuda.max_memory_allocated() - before

    @classmethod
    @torch.inference_mode()
    def launch_without_gpu(
        cls, args: WorkerArgs, parallel: Parallel, *, device: str = "meta", num_blocks: int = 1
    ) -> None:
        """Launches, within kernels.compiling.compiling_only, what `load` compiles, on any machine:
        with tensors on a device where they stand for those on a GPU (see compile_for there), and a
        cache of any size. Raises EngineStartError where `load` would.
        """
        runner = cls.__new__(cls)
        runner._prepare(args, torch.device(device))
        runner._parallel = parallel
        backend = pick_attention(args, runner._device)
        if backend.graph_safe:
            runner._make_tables()
            if runner._stage.is_last:
                runner._launch_samplers()  # which take longest
            runner._open_peer_sums()
            runner._load_model()
            runner._attention = runner._make_attention(backend, num_blocks)
            runner._launch_all()

    def _launch_all(self) -> None:
        """Launches what any step may need, for it to be compiled."""
        most, tokens = self._limits.max_num_seqs, self._limits.max_num_batched_tokens
        # What takes longest comes first: the samplers, then attention.
        kinds = [StepSizes(rows, tokens, rows, rows) for rows in {1, most}]
        kinds += [StepSizes(n, n, n, 0) for n in self._decode_sizes()]
        with self._model.kinds_of_layers():
            if self._stage.is_last:
                self._launch_samplers()
            for sizes in kinds:
                self._launch(sizes, StepLayout(sizes.rows, sizes.tokens), empty=torch.zeros)
            # Of tokens of prompts, whose logits are asked for, there may be any number.
            self._model.warm_up((1, 2, 16, 32, 64), with_head=self._stage.is_last)
            self._attention.copy_blocks(np.zeros(1, np.int32), np.zeros(1, np.int32))
            if self._stage.is_last:
                self._launch_masks()

    def _launch_masks(self) -> None:
        """Of the model's own logits, and of those of special rows."""
        vocab, device = self._args.spec.vocab_size, self._device
        mark, words = (
            torch.zeros(1, n, dtype=torch.int32, device=device) for n in (4, -(-vocab // 32))
        )
        for logits in (self._logits[:1, :vocab], torch.zeros(1, vocab, device=device)):
            mask_tokens(logits, mark[0], words)

    def _launch_samplers(self) -> None:
        """That of special rows, which are float32, and that of all others."""
        vocab, size = self._args.spec.vocab_size, self._parallel.size
        column = torch.zeros(4, dtype=torch.int32, device=self._device)
        for width, dtype in ((vocab, torch.float32), (-(-vocab // size) * size, self._dtype)):
            logits = torch.zeros(1, width, dtype=dtype, device=self._device)[:, :vocab]
            self._sample(logits, column, column, column, column, self._special_ids)

    def _decode_sizes(self) -> list[int]:
        return decode_ladder(self._limits.max_num_seqs)

    def _capture(self) -> CudaGraphs:
        """Runs each kind of step once on no rows, then captures the ladder."""
        limits = self._limits
        graphs = CudaGraphs(self._launch)
        decode = [StepSizes(n, n, n, 0) for n in self._decode_sizes()]
        mixed = mixed_ladder(
            limits.max_num_seqs, limits.max_num_batched_tokens, worthwhile_tokens(self._args.spec)
        )
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
        position = self._num_steps % self._rotation
        self._num_steps += 1
        # 1. What is new, and how this step's tokens lie.
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
        # 3. What comes from another stage.
        self._pipeline.begin_step(step.beat)
        if not self._stage.is_first:
            self._pipeline.receive_stream(self._hidden[:tokens])
            started.record()  # again: so far it has only waited
        # 4. The whole step, or this stage's part: inputs, model, sampling of plain rows.
        about_prompts: list[Logprobs] = []
        if found is not None:
            found.graph.replay()
        else:
            about_prompts = self._launch(
                self._eager_sizes(rows, tokens, decodes), layout, batch, prompts
            )
        # 5. The other rows, on the logits that the step has left. The device is at work while the
        #    masks are made.
        more: SpecialOutput | None = None
        if self._stage.is_last:
            if step.awaits_masks and receive_masks is not None:
                self._special.masks.take(step, receive_masks())
            if apart is not None and len(apart.masked):
                self._sample_masked(batch, apart.masked, position, layout)
            more = self._run_special(batch, apart, position, about_prompts)
        done.record()
        # 6. What goes to another stage.
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
        self._pipeline.settle()

    def _find_special(
        self, step: StepInput, batch: HostBatch
    ) -> tuple[Apart | None, PromptTokens | None]:
        """Rows that are sampled apart, and tokens of prompts that are asked about; both are the
        last stage's.
        """
        if not self._stage.is_last:
            return None, None
        self._special.enter(step)
        return self._special.find(batch), self._special.find_prompts(batch)

    def _sample_masked(
        self, batch: HostBatch, rows: Int64, position: int, layout: StepLayout
    ) -> None:
        """Samples plain rows that had to wait for their masks, by what the step's message still
        says of them: one small copy and three kernels. A mark says both which mask a row has and
        that it samples.
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
        """Samples special rows as plain ones are sampled."""
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
        # The pinned row of this step, from where the rows of earlier parts end; that is aligned
        # too.
        self._sample(logits, header, slots, seq_lens, samples, self._special_ids[:, part.first :])
        return self._tables.last_sampled.index_select(0, part.slot_index).long()

    def _eager_sizes(self, rows: int, tokens: int, decodes: int) -> StepSizes:
        """Padded to few different sizes: for a new one the library of products may choose a kernel
        it has not loaded yet, which stops the device, and the allocator may have to look for
        memory. A backend that works from the host's view knows no padding.
        """
        if not self._attention.graph_safe:
            return StepSizes(rows, tokens, decodes, rows - decodes)
        padded = next(size for size in self._decode_sizes() if size >= rows)
        if decodes == tokens:
            return StepSizes(padded, padded, padded, 0)
        return StepSizes(
            padded, min(-(-tokens // _PAD) * _PAD, self._layout.tokens), decodes, rows - decodes
        )

    def _launch(
        self,
        sizes: StepSizes,
        layout: StepLayout,
        host: HostBatch | None = None,
        prompts: PromptTokens | None = None,
        *,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> list[Logprobs]:
        """Launches every kernel of a step whose message is on the device. prompts: tokens that are
        asked about; returns what is to be told of them. empty: makes what the first kernel
        writes.
        """
        message, tables, device = self._message, self._tables, self._device

        def column(name: str, extra: int = 0) -> Tensor:
            return message[layout.at(name) : layout.at(name) + sizes.rows + extra]

        token_ids, positions, places = (
            empty(sizes.tokens, dtype=torch.int32, device=device) for _ in range(3)
        )
        last_tokens = empty(sizes.rows, dtype=torch.int32, device=device)
        prepare_step(
            message, layout, tables, token_ids, positions, places, last_tokens, self._block_size
        )
        slots, seq_lens = column("slots"), column("seq_lens")
        self._attention.begin_step(
            StepBatch(
                positions=positions,
                places=places,
                host=host,
                rows=DeviceRows(
                    header=message[:HEADER],
                    slots=slots,
                    seq_lens=seq_lens,
                    query_starts=column("query_starts", 1),
                    block_tables=tables.block_tables,
                    max_decode_rows=sizes.max_decode_rows,
                    max_prompt_rows=sizes.max_prompt_rows,
                ),
            )
        )
        inputs = token_ids if self._stage.is_first else self._hidden[: sizes.tokens]
        if not self._stage.is_last:
            hidden = self._model.states(inputs, self._attention, None).hidden
            if hidden.data_ptr() != self._hidden.data_ptr():  # added to in place
                self._hidden[: sizes.tokens].copy_(hidden)
            return []
        rows = None if sizes.decode_only else last_tokens
        if prompts is not None:
            rows = with_prompt_tokens(last_tokens, prompts)
        stream = self._model.states(inputs, self._attention, rows)
        logits = self._model.logits(
            stream if prompts is None else stream.part(0, sizes.rows), self._logits[: sizes.rows]
        )
        mask_logits(logits, message, message[MASKED:])
        self._sample(logits, message[SAMPLING:], slots, seq_lens, column("samples"), self._out_ids)
        return [] if prompts is None else prompt_logprobs(self._model, stream, sizes.rows, prompts)

    def _sample(
        self,
        logits: Tensor,
        header: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        samples: Tensor,
        out_ids: Tensor,
    ) -> None:
        """See sample_tokens."""
        tables = self._tables
        sample_tokens(
            logits,
            header=header,
            slots=slots,
            seq_lens=seq_lens,
            samples=samples,
            temperature=tables.temperature,
            top_k=tables.top_k,
            top_p=tables.top_p,
            min_p=tables.min_p,
            seed=tables.seed,
            scratch=self._scratch,
            last_sampled=tables.last_sampled,
            out_ids=out_ids,
            pdl=has_pdl(self._device),
        )
