"""The base of a GPU's runner: its sizes, and the memory on the device that all steps share.

Nothing here needs a GPU (see executor/gpu/warm_up.py).
"""

from __future__ import annotations

import torch

from sidestep.executor.gpu.device_tables import RowColumns, make_slot_tables
from sidestep.executor.gpu.step_packer import message_size
from sidestep.executor.gpu.token_sampler import TokenSampler, check_method
from sidestep.executor.models.model_loading import pick_attention, pick_dtype
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.recurrent.device_places import DevicePlaces
from sidestep.executor.recurrent.state_words import StateWords
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import GPU_BLOCK_SIZE
from sidestep.ipc.model.layer_spec import recurrent_of
from sidestep.kernels.triton.prepare_step_triton import NUM_COMPUTED, StepLayout


class GpuSetup:
    """Sizes and types of a rank on a GPU, as its arguments say."""

    def __init__(self, args: WorkerArgs, device: torch.device) -> None:
        """Raise EngineStartError for arguments that a GPU does not take."""
        self.args = args
        self.device = device
        self.stage = args.stage
        self.samples = self.stage.is_last and args.spec.pooling is None
        """Whether this rank samples tokens."""
        self.dtype = pick_dtype(args, device)
        self.block_size = args.cache.block_size or GPU_BLOCK_SIZE
        if self.block_size % 16:
            raise EngineStartError(
                f"block_size: must be a multiple of 16 on a GPU, not {self.block_size}"
            )
        check_method(args.scheduler.speculation)
        self.limits = args.scheduler.limits("cuda", self.stage.count, args.spec.layers)
        self.has_states = bool(recurrent_of(args.spec.layers))
        """Whether the model has recurrent layers."""
        self.rotation = self.limits.max_steps_in_flight + 2
        """Number of buffers for messages and outputs."""
        self.backend = pick_attention(args, device)
        if self.limits.num_drafts and not self.backend.graph_safe:
            raise EngineStartError(
                "attention_backend: with speculative_config a GPU needs 'triton', since only the "
                "device knows how long its rows are"
            )

    def open_peer_sums(self, parallel: Parallel) -> None:
        """Let the ranks of a stage sum through their own memory, where they can."""
        if not self.args.parallel.disable_custom_all_reduce:
            parallel.open_peer_sums(
                self.args.spec.hidden_size,
                self.dtype,
                self.limits.max_num_batched_tokens,
                self.device,
            )


class StepMemory:
    """Memory on the device that all steps use: message, tables, and the sampler's."""

    def __init__(self, setup: GpuSetup) -> None:
        args, limits, device, last = setup.args, setup.limits, setup.device, setup.samples
        self.layout = StepLayout(limits.max_num_seqs, limits.max_num_batched_tokens)
        """The layout of the largest step's message."""
        self.tables = make_slot_tables(
            limits,
            args.max_model_len,
            setup.block_size,
            args.cache_groups.count,
            device,
            last=last,
        )
        self.max_blocks = self.tables.block_tables.shape[2]
        """KV blocks of the longest request."""
        self.states = StateWords(limits) if setup.has_states else None
        """The places of what recurrent layers need of a step, in a model that has some."""
        self.places = (
            DevicePlaces(limits, self.tables.progress[:, NUM_COMPUTED])
            if setup.has_states and limits.num_drafts
            else None
        )
        """Where their states lie; None where the host knows."""
        before = self.states.count if self.states is not None else 0
        self.words = torch.zeros(
            before + message_size(self.layout, self.max_blocks), dtype=torch.int32, device=device
        )
        """All that the host sends for a step: the words of states, then the message."""
        self.message = self.words[before:]
        self.columns = RowColumns(limits, device)
        tokens = limits.max_num_batched_tokens if setup.stage.count > 1 else 0
        self.hidden = torch.zeros(tokens, args.spec.hidden_size, dtype=setup.dtype, device=device)
        """The residual stream, as it comes from the stage before and goes to the next stage."""
        self.sampler = (
            TokenSampler(
                self.tables,
                limits,
                args.scheduler.speculation,
                args.spec.vocab_size,
                setup.rotation,
            )
            if last
            else None
        )
        """None where nothing is sampled."""
