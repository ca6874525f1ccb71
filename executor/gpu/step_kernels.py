"""The kernels of a GPU's step, and the memory on the device that they read and write.

Nothing here needs a GPU. So the process that compiles kernels ahead
(executor/processes/kernel_compiler.py) launches them from here too, with tensors that stand for
those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, DeviceRows, StepBatch
from sidestep.executor.gpu.cuda_graphs import StepSizes, decode_ladder, draft_sizes, most_queries
from sidestep.executor.gpu.device_tables import RowColumns, make_slot_tables
from sidestep.executor.gpu.step_packer import message_size
from sidestep.executor.gpu.token_sampler import TokenSampler, check_method
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.models.model_loading import (
    load_model,
    load_rotary,
    pick_attention,
    pick_dtype,
)
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.sampling.prompt_logprobs import (
    PromptTokens,
    prompt_logprobs,
    with_prompt_tokens,
)
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import GPU_BLOCK_SIZE
from sidestep.ipc.model.speculative_config import tiers_of
from sidestep.kernels.launch_order import checked_order
from sidestep.kernels.ops.token_masks import mask_tokens
from sidestep.kernels.triton.mask_logits_triton import mask_logits
from sidestep.kernels.triton.prepare_step_triton import (
    HEADER,
    MASKED,
    StepLayout,
    prepare_step,
)


class StepKernels:
    """The part of a GPU's runner that allocates device memory and launches kernels."""

    _parallel: Parallel
    _attention: AttentionBackend

    def _prepare(self, args: WorkerArgs, device: torch.device) -> None:
        """Set what needs no GPU."""
        self._args = args
        self._stage = args.stage
        self._device = device
        self._dtype = pick_dtype(args, device)
        self._block_size = args.cache.block_size or GPU_BLOCK_SIZE
        if self._block_size % 16:
            raise EngineStartError(
                f"block_size: must be a multiple of 16 on a GPU, not {self._block_size}"
            )
        check_method(args.scheduler.speculation)
        self._limits = args.scheduler.limits("cuda", self._stage.count)
        self._rotation = self._limits.max_steps_in_flight + 2

    def _pick_attention(self) -> type[AttentionBackend]:
        """Return the attention backend.

        Raises EngineStartError if it cannot run here, or not with speculation.
        """
        backend = pick_attention(self._args, self._device)
        if self._limits.num_drafts and not backend.graph_safe:
            raise EngineStartError(
                "attention_backend: with speculative_config a GPU needs 'triton', since only the "
                "device knows how long its rows are"
            )
        return backend

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
        if self._device.type == "cuda":
            # Otherwise later buffers would lie among memory that loading has used, between the
            # weights, and keep it from the device when the weights are freed (see sleep).
            torch.cuda.empty_cache()
        self._rotary = load_rotary(self._args, self._device)
        if self._stage.is_last:
            self._logits = self._model.new_logits(most_queries(self._limits))

    def _make_tables(self) -> None:
        """Allocate the message and the tables on the device."""
        args, limits, device = self._args, self._limits, self._device
        self._layout = StepLayout(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._tables = make_slot_tables(
            limits, args.max_model_len, self._block_size, device, last=self._stage.is_last
        )
        self._message = torch.zeros(
            message_size(self._layout, self._tables.block_tables.shape[1]),
            dtype=torch.int32,
            device=device,
        )
        self._columns = RowColumns(limits, device)
        tokens = limits.max_num_batched_tokens if self._stage.count > 1 else 0
        self._hidden = torch.zeros(tokens, args.spec.hidden_size, dtype=self._dtype, device=device)
        """The residual stream, as it comes from the stage before and goes to the next stage."""
        if self._stage.is_last:
            self._sampler = TokenSampler(
                self._tables,
                limits,
                args.scheduler.speculation,
                args.spec.vocab_size,
                self._rotation,
            )

    def _make_attention(self, backend: type[AttentionBackend], num_blocks: int) -> AttentionBackend:
        """Make the attention backend with a cache of this many blocks."""
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
                queries=tuple(1 + tier for tier in tiers_of(self._limits.num_drafts)),
            )
        )

    @classmethod
    @torch.inference_mode()
    def launch_without_gpu(
        cls, args: WorkerArgs, parallel: Parallel, *, device: str = "meta", num_blocks: int = 1
    ) -> None:
        """Launch what `load` compiles, on any machine, within kernels.compiling.compiling_only.

        The tensors are on a device where they stand for those on a GPU (see
        kernels.compiling.compile_for), and the cache may have any size. Raises EngineStartError
        where `load` would.
        """
        runner = cls.__new__(cls)
        runner._prepare(args, torch.device(device))
        runner._parallel = parallel
        backend = runner._pick_attention()
        if backend.graph_safe:
            runner._make_tables()
            if runner._stage.is_last:
                runner._launch_samplers()  # first: they take longest to compile
            runner._open_peer_sums()
            runner._load_model()
            runner._attention = runner._make_attention(backend, num_blocks)
            runner._launch_all()

    def _launch_all(self) -> None:
        """Launch whatever any step may need, so that it is compiled."""
        most, tokens = self._limits.max_num_seqs, self._limits.max_num_batched_tokens
        # The kernels that take longest to compile come first: the samplers, then attention.
        kinds = [StepSizes(rows, tokens, rows, rows) for rows in {1, most}]
        kinds += [StepSizes(n, n, n, 0) for n in self._decode_sizes()]
        kinds += draft_sizes(self._limits)
        with self._model.kinds_of_layers():
            if self._stage.is_last:
                self._launch_samplers()
            with checked_order():
                for sizes in kinds:
                    self._launch(sizes, sizes.layout, empty=torch.zeros)
            # A step may have any number of prompt tokens whose logits are asked for.
            self._model.warm_up((1, 2, 16, 32, 64), with_head=self._stage.is_last)
            self._attention.copy_blocks(np.zeros(1, np.int32), np.zeros(1, np.int32))
            if self._stage.is_last:
                self._launch_masks()

    def _launch_masks(self) -> None:
        """Launch the masking of the model's own logits, and of those of special rows."""
        vocab, device = self._args.spec.vocab_size, self._device
        mark, words = (
            torch.zeros(1, n, dtype=torch.int32, device=device) for n in (4, -(-vocab // 32))
        )
        for logits in (self._logits[:1, :vocab], torch.zeros(1, vocab, device=device)):
            mask_tokens(logits, mark[0], words)

    def _launch_samplers(self) -> None:
        """Launch the sampler of special rows, which are float32, and that of all other rows."""
        vocab, size = self._args.spec.vocab_size, self._parallel.size
        rows = self._columns.step_rows(self._message, self._layout, 1, 1)
        own = torch.zeros(1, -(-vocab // size) * size, dtype=self._dtype, device=self._device)
        copies = torch.zeros(1, vocab, device=self._device)
        column = torch.zeros(4, dtype=torch.int32, device=self._device)
        self._sampler.sample_copies(copies, column, column, column[:1], column)
        self._sampler.sample_plain(own[:, :vocab], rows, rows.samples)
        self._sampler.advance(rows, rows.valid, rows.samples)

    def _decode_sizes(self) -> list[int]:
        """Return the batch sizes of decode graphs."""
        return decode_ladder(self._limits.max_num_seqs)

    def _launch(
        self,
        sizes: StepSizes,
        layout: StepLayout,
        host: HostBatch | None = None,
        prompts: PromptTokens | None = None,
        *,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> list[Logprobs]:
        """Launch every kernel of a step whose message is on the device.

        prompts: prompt tokens whose log-probabilities are asked for; returns those
        log-probabilities. empty: allocates what the first kernel writes.
        """
        message, tables, device = self._message, self._tables, self._device
        rows = self._columns.step_rows(message, layout, sizes.rows, sizes.queries)
        token_ids, positions, slot_mapping = (
            empty(sizes.tokens, dtype=torch.int32, device=device) for _ in range(3)
        )
        prepared = self._columns.step_inputs(
            sizes,
            token_ids,
            positions,
            slot_mapping,
            empty(sizes.rows, dtype=torch.int32, device=device),
        )
        prepare_step(message, layout, tables, prepared, self._block_size, sizes.queries)
        starts = layout.at("query_starts")
        self._attention.begin_step(
            StepBatch(
                positions=positions,
                slot_mapping=slot_mapping,
                host=host,
                rows=DeviceRows(
                    header=message[:HEADER],
                    slots=rows.slots,
                    seq_lens=rows.seq_lens,
                    query_starts=message[starts : starts + sizes.rows + 1],
                    block_tables=tables.block_tables,
                    max_decode_rows=sizes.max_decode_rows,
                    max_prompt_rows=sizes.max_prompt_rows,
                    queries=sizes.queries,
                    valid_lens=rows.valid_lens if sizes.queries > 1 else None,
                ),
            )
        )
        inputs = token_ids if self._stage.is_first else self._hidden[: sizes.tokens]
        if not self._stage.is_last:
            hidden = self._model.states(inputs, self._attention, None).hidden
            if hidden.data_ptr() != self._hidden.data_ptr():  # added to in place
                self._hidden[: sizes.tokens].copy_(hidden)
            return []
        chosen = None if sizes.decode_only else prepared.last_tokens
        if prompts is not None:
            chosen = with_prompt_tokens(prepared.last_tokens, prompts)
        stream = self._model.states(inputs, self._attention, chosen)
        count = sizes.rows * sizes.queries
        logits = self._model.logits(
            stream if prompts is None else stream.part(0, count), self._logits[:count]
        )
        mask_logits(logits, message, message[MASKED:], rows.query_lens, sizes.queries)
        self._sampler.sample_step(logits, rows)
        return [] if prompts is None else prompt_logprobs(self._model, stream, sizes.rows, prompts)
