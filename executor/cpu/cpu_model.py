"""A rank's model and KV cache in the memory of a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sidestep.executor.attention.base import AttentionBackend, AttentionSetup, StepBatch
from sidestep.executor.models.decoder import DecoderForCausalLM, attention_shape
from sidestep.executor.models.model_loading import (
    load_model,
    load_rotary,
    pick_attention,
    pick_dtype,
)
from sidestep.executor.models.weight_memory import weight_bytes
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.kv_cache_size import cpu_kv_blocks
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.sleep import resident_bytes, return_freed_memory
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import StepLimits
from sidestep.ipc.model.cache_sizes import CPU_BLOCK_SIZE
from sidestep.ipc.transport.worker_calls import CallResult, MemoryUse
from sidestep.kernels.ops.rms_norm import Stream

CPU = torch.device("cpu")


class CpuModel:
    """This rank's layers and their cache. A sleep frees them, and no step runs meanwhile."""

    def __init__(self, args: WorkerArgs, limits: StepLimits, parallel: Parallel) -> None:
        """Load the weights and allocate the cache. Raises EngineStartError."""
        self._args = args
        """Arguments whose folder has the weights that are in use."""
        self._limits = limits
        self._parallel = parallel
        self._shape = attention_shape(args.spec, parallel, args.stage)
        self.dtype = pick_dtype(args, CPU)
        self.block_size = args.cache.block_size or CPU_BLOCK_SIZE
        self._decoder: DecoderForCausalLM | None = self.read_weights(args)
        # Block ids are common to all ranks, so the rank with the least room decides.
        self.num_blocks = parallel.minimum(
            cpu_kv_blocks(args, limits, self._shape.bytes_per_token(self.dtype), self.block_size)
        )
        self._attention: AttentionBackend | None = self._new_attention()

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
        return self.decoder.states(inputs, self.attention, rows)

    def memory_use(self, call: MemoryUse) -> CallResult:
        """Return the bytes of the weights, of the KV cache and of the whole process."""
        return {
            "weights": weight_bytes(self._decoder),
            "kv_cache": 0 if self._attention is None else self._attention.cache.nbytes,
            "resident": resident_bytes(),
        }

    def free(self, level: int) -> int:
        """Free the KV cache, and at level 2 the weights; return the bytes.

        Level 1 keeps the weights in the host's memory, where they are already.
        """
        before = resident_bytes()
        self._attention = None
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
        self._attention = self._new_attention()

    @torch.inference_mode()
    def read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model with its weights laid out for this CPU."""
        return load_model(args, self._parallel, self.dtype, CPU)

    def use_weights(self, model: DecoderForCausalLM, args: WorkerArgs) -> None:
        """Put the model in the place of the old one."""
        self._decoder, self._args = model, args
        return_freed_memory()

    def _new_attention(self) -> AttentionBackend:
        """Return the attention backend with an empty cache."""
        args = self._args
        return pick_attention(args, CPU)(
            AttentionSetup(
                shape=self._shape,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                dtype=self.dtype,
                device=CPU,
                rotary=load_rotary(args, CPU),
                norm_eps=args.spec.norm.eps,
                max_rows=self._limits.max_num_seqs,
            )
        )
