"""A rank's model and KV cache in the memory of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, StepBatch
from sidestep.executor.attention.mixed_shapes import open_attention
from sidestep.executor.cpu.step_tapes import StepTapes
from sidestep.executor.models.decoder import DecoderForCausalLM, attention_shape
from sidestep.executor.models.model_loading import (
    load_model,
    load_rotary,
    pick_attention,
    pick_dtype,
)
from sidestep.executor.models.weight_memory import weight_bytes
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.recurrent.state_memory import StateMemory
from sidestep.executor.recurrent.state_places import StatePlaces
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.kv_cache_size import cpu_kv_blocks, cpu_states
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.sleep import resident_bytes, return_freed_memory
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import cache_folder_of_environment
from sidestep.ipc.model.cache_sizes import CPU_BLOCK_SIZE
from sidestep.ipc.model.layer_spec import recurrent_of
from sidestep.ipc.step_limits import StepLimits
from sidestep.ipc.transport.worker_calls import CallResult, MemoryUse
from sidestep.kernels.native.library import keep_in
from sidestep.kernels.ops.rms_norm import Stream

CPU = torch.device("cpu")


class CpuModel:
    """This rank's layers and their cache. A sleep frees them, and no step runs meanwhile."""

    def __init__(self, args: WorkerArgs, limits: StepLimits, parallel: Parallel) -> None:
        """Load the weights and allocate the cache. Raises EngineStartError."""
        keep_in(cache_folder_of_environment())
        self._args = args
        """Arguments whose folder has the weights that are in use."""
        self._limits = limits
        self._parallel = parallel
        self._shape = attention_shape(args.spec, parallel, args.stage, args.max_model_len)
        self.dtype = pick_dtype(args, CPU)
        self.block_size = args.cache.block_size or CPU_BLOCK_SIZE
        self._decoder: DecoderForCausalLM | None = self.read_weights(args)
        # Ids of blocks and states are common to all ranks, so the rank with the least room decides.
        self.num_blocks = parallel.minimum(
            cpu_kv_blocks(args, limits, self._shape.kv_layout(self.dtype, self.block_size))
        )
        self.num_states = (
            parallel.minimum(cpu_states(args, limits, self.dtype.itemsize))
            if recurrent_of(args.spec.layers)
            else 0
        )
        """States of recurrent layers; 0 in a model without such layers."""
        self._attention: AttentionBackend | None = self._new_attention()
        self._recurrent: StateMemory | None = self._new_states()
        self._tapes: StepTapes | None = self._new_tapes()
        self._places = StatePlaces(limits.num_slots, limits.state_width)

    @property
    def decoder(self) -> DecoderForCausalLM:
        """The layers of this rank, which is awake."""
        assert self._decoder is not None, "the rank sleeps"
        return self._decoder

    @property
    def attention(self) -> AttentionBackend:
        """The backend with the cache of this rank, which is awake."""
        assert self._attention is not None, "the rank sleeps"
        return self._attention

    @property
    def recurrent(self) -> StateMemory:
        """The states of this rank, which is awake, in a model with recurrent layers."""
        assert self._recurrent is not None, "the rank sleeps, or has no states"
        return self._recurrent

    def states(self, inputs: Tensor, batch: HostBatch, rows: Tensor | None) -> Stream:
        """Return what this rank's last layer gives for the tokens at `rows`, or for all."""
        self.attention.begin_step(
            StepBatch(
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                host=batch,
                rows=None,
            )
        )
        recurrent = (
            self.recurrent.with_columns(self._places.columns(batch)) if self.num_states else None
        )
        tapes = self._tapes
        if rows is None and tapes is not None and tapes.takes(batch.total_tokens, recurrent):
            return tapes.states(inputs, recurrent)
        return self.decoder.states(inputs, self.attention, rows, recurrent)

    def memory_use(self, call: MemoryUse) -> CallResult:
        """Return the bytes of the weights, of the KV cache with states, and of the process."""
        states = 0 if self._recurrent is None else self._recurrent.nbytes
        return {
            "weights": weight_bytes(self._decoder),
            "kv_cache": states + (0 if self._attention is None else self._attention.cache.nbytes),
            "resident": resident_bytes(),
        }

    def free(self, level: int) -> int:
        """Free the KV cache, and at level 2 the weights; return the bytes.

        Level 1 keeps the weights in the host's memory, where they are already.
        """
        before = resident_bytes()
        self._attention = self._recurrent = self._tapes = None
        if level == 2:
            self._decoder = None
        return_freed_memory()
        return max(0, before - resident_bytes())

    @torch.inference_mode()
    def restore(self, level: int) -> None:
        """Read the weights again after level 2, and allocate the cache."""
        if level == 2:
            try:
                self._decoder = self.read_weights(self._args)
            except EngineStartError as error:
                raise CallRefusedError(str(error)) from None
        self._attention, self._recurrent = self._new_attention(), self._new_states()
        self._tapes = self._new_tapes()

    @torch.inference_mode()
    def read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model with its weights laid out for this CPU."""
        model = load_model(args, self._parallel, self.dtype, CPU)
        return_freed_memory()  # what weights took on their way
        return model

    def use_weights(self, model: DecoderForCausalLM, args: WorkerArgs) -> None:
        """Put the model in the place of the old one."""
        self._decoder, self._args = model, args
        self._tapes = None  # they have the old weights' memory
        return_freed_memory()
        if self._attention is not None:
            self._tapes = self._new_tapes()

    def _new_tapes(self) -> StepTapes | None:
        """Return tapes of the layers; None with several ranks, and where none are wanted."""
        if self._args.parallel.enforce_eager or self._parallel.size > 1:
            return None
        return StepTapes(self.decoder, self.attention)

    def _new_states(self) -> StateMemory | None:
        """Return memory for the states of recurrent layers; None in a model without such layers."""
        if not self.num_states:
            return None
        specs = recurrent_of(self._args.stage_layers)
        width = self._limits.state_width
        return StateMemory(specs, self.num_states, self._parallel, self.dtype, CPU, width)

    def _new_attention(self) -> AttentionBackend:
        """Return the attention backend with an empty cache."""
        args = self._args
        return open_attention(
            pick_attention(args, CPU),
            AttentionSetup(
                shape=self._shape,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                dtype=self.dtype,
                device=CPU,
                rotary=load_rotary(args, CPU),
                norm_eps=args.spec.norm.eps,
                max_rows=self._limits.max_num_seqs,
            ),
        )
