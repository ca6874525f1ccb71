"""The model of a rank on its GPU: weights, KV cache and graphs, which a sleep frees.

Graphs keep addresses, so they are captured again at the end of a sleep. All ranks do the same or
none does: each step and each capture is a matter of all of them. New weights are written over the
old ones, at the addresses that the graphs have.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from sidestep.executor.gpu.cuda_graphs import CudaGraphs, capture_steps
from sidestep.executor.gpu.gpu_setup import GpuSetup, StepMemory
from sidestep.executor.gpu.step_kernels import LoadedModel, StepKernels
from sidestep.executor.gpu.warm_up import warm_up
from sidestep.executor.models.decoder import DecoderForCausalLM, attention_shape
from sidestep.executor.models.model_loading import load_model
from sidestep.executor.models.new_weights import check_same_weights, copy_weights
from sidestep.executor.models.weight_memory import HostCopy, weight_bytes, weights_of
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.kv_cache_size import gpu_kv_blocks, gpu_states, state_bytes
from sidestep.executor.runner.largest_step import ALL_CONTROLS, largest_step
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.cache_sizes import GPU_MARGIN_BYTES
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.step import StepInput
from sidestep.ipc.transport.worker_calls import CallResult, MemoryUse
from sidestep.kernels.gpu import gpu_of, like_gpu

_GIB = 1 << 30
_OTHERS = "another rank cannot"
"""A refusal of ranks that could do what another rank cannot."""


class GpuModel:
    """The owner of all memory that a sleep frees."""

    def __init__(self, setup: GpuSetup, memory: StepMemory, parallel: Parallel) -> None:
        """Load the weights, and allocate a cache of one block; `size_cache` allocates the rest."""
        self._setup = setup
        self._memory = memory
        self._parallel = parallel
        self._args = setup.args
        """Arguments whose folder has the weights that are in use."""
        self._loaded: LoadedModel | None = LoadedModel(setup, parallel, setup.args)
        """None during a sleep of level 2."""
        self.num_blocks = 1
        self.num_states = int(setup.has_states)
        """States of recurrent layers; 0 in a model without such layers."""
        self.kernels: StepKernels | None = self._new_kernels(self._loaded)
        """None during a sleep."""
        self.graphs: CudaGraphs | None = None
        """None during a sleep, and in a runner that captures none."""
        self._host_copy: HostCopy | None = None
        """The weights during a sleep of level 1."""
        self._freed_bytes = 0

    def size_cache(self, run: Callable[[StepInput], None]) -> None:
        """Allocate what fits of the cache beside the largest step, and capture the graphs.

        run: runs a step to its end on the cache of one block. All stages of a pipeline do so
        together: they send each other the same messages as in any step.
        """
        setup = self._setup
        if self.kernels is not None and setup.backend.graph_safe:
            warm_up(setup, self._memory, self._parallel, self.kernels)
        # The plain step comes last: it takes the slots of the requests with controls, so nothing is
        # kept for those afterwards.
        controlled, plain = (
            self._working_bytes(run, controls) for controls in (ALL_CONTROLS, Controls())
        )
        self.kernels = None
        torch.cuda.empty_cache()
        self._count_blocks(self._bytes_beside(controlled, plain))
        self._begin()

    def _working_bytes(self, run: Callable[[StepInput], None], controls: Controls) -> int:
        """Return the bytes that the largest step takes, with these controls in each row."""
        setup = self._setup
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(largest_step(setup.limits, setup.args.max_model_len, setup.block_size, controls))
        return torch.cuda.max_memory_allocated() - before

    def _bytes_beside(self, controlled: int, plain: int) -> int:
        """Return the bytes that the cache leaves to the largest step and to graphs.

        controlled, plain: bytes that the step takes, with controls in all rows and in none.
        """
        setup = self._setup
        # Graphs keep a pool of their own, which the largest of them fills like a step outside of
        # graphs.
        graphs = plain if self._captures else 0
        # One copy of the stream is in `plain`; each further step in flight may have one more.
        sent = (
            0
            if setup.stage.is_last
            else self._memory.hidden.nbytes * setup.limits.max_steps_in_flight
        )
        return max(controlled, plain) + graphs + sent + GPU_MARGIN_BYTES

    def _count_blocks(self, working: int) -> None:
        """Set the numbers of states and of KV blocks that fit beside `working` bytes."""
        setup, args, itemsize = self._setup, self._setup.args, self._setup.dtype.itemsize
        free, total = torch.cuda.mem_get_info(setup.device)
        # Ids of blocks and states are common to all ranks, so the rank with the least room decides.
        if setup.has_states:
            self.num_states = self._parallel.minimum(
                gpu_states(args, setup.limits, itemsize, free=free, total=total, working=working)
            )
        shape = attention_shape(args.spec, self._parallel, setup.stage, args.max_model_len)
        self.num_blocks = self._parallel.minimum(
            gpu_kv_blocks(
                args,
                setup.limits,
                shape.kv_layout(setup.dtype, setup.block_size),
                free=free,
                total=total,
                working=working,
                states=self.num_states * state_bytes(args, setup.limits, itemsize),
            )
        )

    @property
    def _captures(self) -> bool:
        # The steps of a model that pools are prompts, and what is made of them differs in size.
        args = self._setup.args
        return (
            self._setup.backend.graph_safe
            and not args.parallel.enforce_eager
            and args.spec.pooling is None
        )

    def _new_kernels(self, loaded: LoadedModel) -> StepKernels:
        return StepKernels(
            self._setup, self._memory, self._parallel, loaded, self.num_blocks, self.num_states
        )

    def _begin(self) -> None:
        """Allocate the cache and capture the graphs, with the weights in place."""
        assert self._loaded is not None, "the weights are not there"
        self.kernels = self._new_kernels(self._loaded)
        if self._captures:
            self._memory.words.zero_()  # a step without rows
            self.graphs = capture_steps(
                self.kernels.launch,
                self._loaded.decoder.kinds_of_layers,
                self.kernels.decode_sizes(self._setup.limits.max_num_seqs),
                self._setup.limits,
                self._setup.args.spec,
            )
        torch.cuda.synchronize()

    def memory_use(self, call: MemoryUse) -> CallResult:
        """Return the bytes of the weights, of the cache with states, of torch and of the GPU."""
        free, total = torch.cuda.mem_get_info(self._setup.device)
        return {
            "weights": 0 if self._loaded is None else weight_bytes(self._loaded.decoder),
            "kv_cache": 0 if self.kernels is None else self.kernels.cache_bytes,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
            "total": total,
        }

    # Sleep.

    @torch.inference_mode()
    def free(self, level: int) -> int:
        """Free the cache, the graphs and the weights; level 1 copies the weights to the host."""
        torch.cuda.synchronize()
        self._copy_to_host(level)
        # Not what the GPU has free: other programs take and free memory of it meanwhile.
        reserved = torch.cuda.memory_reserved()
        self.graphs = self.kernels = None
        if self._host_copy is not None:
            self._host_copy.free()
        else:
            self._loaded = None
        gc.collect()
        # The library of products keeps memory for each stream that it has run on, which lies in the
        # pool of the graphs that were captured there.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # no build for CPUs has it
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
        self._freed_bytes = reserved - torch.cuda.memory_reserved()
        return self._freed_bytes

    @torch.inference_mode()
    def restore(self, level: int) -> None:
        """Take the memory again, and fill it as it was, but for the cache."""
        problem = self._why_not_yet()
        if problem is None and level == 2:
            try:
                self._loaded = LoadedModel(self._setup, self._parallel, self._args)
            except EngineStartError as error:
                problem = str(error)
        try:
            self._agree(problem)
        except CallRefusedError:
            if level == 2:
                self._loaded = None
                torch.cuda.empty_cache()
            raise
        if self._host_copy is not None:
            self._host_copy.restore()
            self._host_copy = None
        self._begin()

    def _copy_to_host(self, level: int) -> None:
        """Copy the weights at level 1. Raises CallRefusedError on all ranks if one cannot."""
        assert self._loaded is not None, "the rank sleeps"
        problem: str | None = None
        if level == 1:
            try:
                self._host_copy = HostCopy(weights_of(self._loaded.decoder).values())
            except RuntimeError as error:
                problem = f"the host has too little memory: {str(error).splitlines()[0]}"
        try:
            self._agree(problem)
        except CallRefusedError:
            self._host_copy = None
            raise

    def _why_not_yet(self) -> str | None:
        """Return why the device's memory cannot be taken again, or None if it can."""
        free, _ = torch.cuda.mem_get_info(self._setup.device)
        if free >= self._freed_bytes:
            return None
        return (
            f"the GPU has {free / _GIB:.1f} GiB free of the {self._freed_bytes / _GIB:.1f} that "
            "the engine needs; stop other programs on this GPU"
        )

    def _agree(self, problem: str | None) -> None:
        """Raise CallRefusedError on all ranks if any rank has a problem."""
        if not self._parallel.minimum(problem is None):
            raise CallRefusedError(problem or _OTHERS)

    # New weights.

    @torch.inference_mode()
    def read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model in the host's memory, whose weights are those of the one on the GPU."""
        gpu = gpu_of(self._setup.device)
        assert gpu is not None and self._loaded is not None
        with like_gpu(gpu, "cpu"):
            model = load_model(args, self._parallel, self._setup.dtype, torch.device("cpu"))
        check_same_weights(self._loaded.decoder, model)
        return model

    @torch.inference_mode()
    def use_weights(self, model: DecoderForCausalLM, args: WorkerArgs) -> None:
        """Copy the weights, behind the steps that are queued."""
        assert self._loaded is not None, "the rank sleeps"
        copy_weights(self._loaded.decoder, model)
        self._args = args
