"""The kernels of a GPU's step: the model with its cache, and the order of its launches.

Nothing here needs a GPU. So the process that compiles kernels ahead
(executor/processes/kernel_compiler.py) launches them from here too, with tensors that stand for
those on a GPU (executor/gpu/warm_up.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sidestep.executor.attention.base import (
    AttentionBackend,
    AttentionSetup,
    DeviceRows,
    SplitStep,
    StepBatch,
)
from sidestep.executor.attention.mixed_shapes import open_attention
from sidestep.executor.gpu.cuda_graphs import StepSizes, decode_ladder, most_queries
from sidestep.executor.gpu.device_tables import StepRows
from sidestep.executor.gpu.gpu_setup import GpuSetup, StepMemory
from sidestep.executor.layers.gated_delta import RecurrentStep
from sidestep.executor.models.decoder import attention_shape
from sidestep.executor.models.model_loading import load_model, load_rotary
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.recurrent.state_memory import StateMemory
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.sampling.prompt_logprobs import (
    PromptTokens,
    prompt_logprobs,
    with_prompt_tokens,
)
from sidestep.executor.sampling.token_logprobs import Logprobs
from sidestep.ipc.model.layer_spec import ExpertsSpec, recurrent_of
from sidestep.ipc.model.model_size import layers_size
from sidestep.ipc.model.speculative_config import tiers_of
from sidestep.kernels.ops.rms_norm import Stream
from sidestep.kernels.triton.mask_logits_triton import mask_logits
from sidestep.kernels.triton.prepare_step_triton import (
    HEADER,
    MASKED,
    StepInputs,
    StepLayout,
    prepare_step,
)


class LoadedModel:
    """This rank's layers, and the memory that belongs to them."""

    def __init__(self, setup: GpuSetup, parallel: Parallel, args: WorkerArgs) -> None:
        """Load the weights. args: their folder is the one that is read."""
        device = setup.device
        self.decoder = load_model(args, parallel, setup.dtype, device)
        if device.type == "cuda":
            # Otherwise later buffers would lie among memory that loading has used, between the
            # weights, and keep it from the device when the weights are freed (see sleep).
            torch.cuda.empty_cache()
        self.rotary = load_rotary(args, device)
        self.logits = (
            self.decoder.new_logits(most_queries(setup.limits))
            if setup.samples
            else torch.empty(0, device=device)
        )
        """[most queries, V], padded; empty where nothing is sampled."""


class StepKernels:
    """A model with an empty KV cache, and the launches of its steps."""

    def __init__(
        self,
        setup: GpuSetup,
        memory: StepMemory,
        parallel: Parallel,
        model: LoadedModel,
        num_blocks: int,
        num_states: int = 1,
    ) -> None:
        """Allocate the cache. num_states: states of recurrent layers, in a model that has some."""
        self._stage = setup.stage
        self._block_size = setup.block_size
        self._memory = memory
        self.model = model
        self.num_blocks = num_blocks
        quantization = setup.args.spec.quantization
        self.attention = open_attention(
            setup.backend,
            AttentionSetup(
                shape=attention_shape(
                    setup.args.spec, parallel, setup.stage, setup.args.max_model_len
                ),
                num_blocks=num_blocks,
                block_size=setup.block_size,
                dtype=setup.dtype,
                device=setup.device,
                rotary=model.rotary,
                norm_eps=setup.args.spec.norm.eps,
                max_rows=setup.limits.max_num_seqs,
                queries=tuple(1 + tier for tier in tiers_of(setup.limits.num_drafts)),
                coded_products=quantization is not None and not quantization.is_empty,
                experts=any(isinstance(each.mlp, ExpertsSpec) for each in setup.args.stage_layers),
                split_weights=_split_weights(setup, model, parallel),
            ),
        )
        self.recurrent = (
            StateMemory(
                recurrent_of(setup.args.stage_layers),
                num_states,
                parallel,
                setup.dtype,
                setup.device,
                setup.limits.state_width,
            )
            if setup.has_states
            else None
        )
        """The states, in a model with recurrent layers."""

    @property
    def cache_bytes(self) -> int:
        """The size of the KV cache and the states."""
        states = 0 if self.recurrent is None else self.recurrent.nbytes
        return self.attention.cache.nbytes + states

    def decode_sizes(self, max_rows: int) -> list[StepSizes]:
        """Return the sizes of steps of decodes, and behind them those that may be in parts."""
        whole = [StepSizes(n, n, n, 0) for n in decode_ladder(max_rows)]
        split = [own for own in whole if self.attention.split_context(own.rows) is not None]
        return whole + [replace(own, in_parts=True) for own in split]

    def pays_in_parts(self, sizes: StepSizes, host: HostBatch) -> bool:
        """Return whether it pays to compute this step in parts."""
        context = self.attention.split_context(sizes.rows) if sizes.decode_only else None
        return context is not None and int(host.seq_lens.sum()) in context

    def launch(
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
        memory, model = self._memory, self.model
        rows, prepared, attention = self._prepare(sizes, layout, host, empty)
        inputs, recurrent = self._inputs(sizes, prepared), self._recurrent(sizes, layout)
        if not self._stage.is_last:
            hidden = model.decoder.states(inputs, attention, None, recurrent).hidden
            if hidden.data_ptr() != memory.hidden.data_ptr():  # added to in place
                memory.hidden[: sizes.tokens].copy_(hidden)
            return []
        chosen = None if sizes.decode_only else prepared.last_tokens
        if prompts is not None:
            chosen = with_prompt_tokens(prepared.last_tokens, prompts)
        stream = model.decoder.states(inputs, attention, chosen, recurrent)
        if memory.sampler is None:  # the model pools, and this is a trial
            model.decoder.scores(stream.normed().float())
            return []
        count = sizes.rows * sizes.queries
        logits = model.decoder.logits(
            stream if prompts is None else stream.part(0, count), model.logits[:count]
        )
        mask_logits(logits, memory.message, memory.message[MASKED:], rows.query_lens, sizes.queries)
        memory.sampler.sample_step(logits, rows)
        return (
            [] if prompts is None else prompt_logprobs(model.decoder, stream, sizes.rows, prompts)
        )

    def states(
        self, sizes: StepSizes, layout: StepLayout, host: HostBatch, *, of_rows: bool
    ) -> Stream:
        """Launch the layers of a step in the last stage, and return the residual stream after them.

        of_rows: whether it has the last token of each row alone, else all tokens; both with
        padding behind them.
        """
        _, prepared, attention = self._prepare(sizes, layout, host, torch.empty)
        chosen = prepared.last_tokens if of_rows and not sizes.decode_only else None
        return self.model.decoder.states(
            self._inputs(sizes, prepared), attention, chosen, self._recurrent(sizes, layout)
        )

    def _inputs(self, sizes: StepSizes, prepared: StepInputs) -> Tensor:
        """Return the token ids, or the stream that the stage before has sent."""
        if self._stage.is_first:
            return prepared.token_ids
        return self._memory.hidden[: sizes.tokens]

    def _recurrent(self, sizes: StepSizes, layout: StepLayout) -> RecurrentStep | None:
        """Return what recurrent layers need of the step; None in a model without such layers.

        The first kernel of the step has been launched.
        """
        memory, words = self._memory, self._memory.states
        if self.recurrent is None or words is None:
            return None
        rows = words.rows(
            memory.words,
            sizes.rows,
            sizes.tokens,
            sizes.max_prompt_rows,
            queries=sizes.queries,
            has_many_saves=sizes.has_many_saves,
        )
        if memory.places is not None:
            slots, starts = (
                memory.message[at : at + sizes.rows] for at in map(layout.at, ("slots", "starts"))
            )
            rows = memory.places.place(rows, memory.message[:HEADER], slots, starts)
        return self.recurrent.with_rows(rows)

    def _prepare(
        self,
        sizes: StepSizes,
        layout: StepLayout,
        host: HostBatch | None,
        empty: Callable[..., Tensor],
    ) -> tuple[StepRows, StepInputs, AttentionBackend | SplitStep]:
        """Launch the first kernel; return what it writes, and the step's attention."""
        memory = self._memory
        message, tables, device = memory.message, memory.tables, memory.message.device
        rows = memory.columns.step_rows(message, layout, sizes.rows, sizes.queries)
        token_ids, positions = (
            empty(sizes.tokens, dtype=torch.int32, device=device) for _ in range(2)
        )
        groups, padded = len(tables.block_tables), -(-sizes.tokens // 4) * 4  # to whole 16 bytes
        slot_mapping = empty((groups, padded), dtype=torch.int32, device=device)[:, : sizes.tokens]
        prepared = memory.columns.step_inputs(
            sizes,
            token_ids,
            positions,
            slot_mapping,
            empty(sizes.rows, dtype=torch.int32, device=device),
        )
        prepare_step(message, layout, tables, prepared, self._block_size, sizes.queries)
        starts = layout.at("query_starts")
        batch = StepBatch(
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
        if sizes.in_parts:
            return rows, prepared, self.attention.split(batch)
        self.attention.begin_step(batch)
        return rows, prepared, self.attention


def _split_weights(setup: GpuSetup, model: LoadedModel, parallel: Parallel) -> int | None:
    """Return AttentionSetup.split_weights."""
    if not model.decoder.may_split:
        return None
    layers = setup.args.stage_layers
    return layers_size(setup.args.spec, parallel.size, layers).parameters // len(layers)
