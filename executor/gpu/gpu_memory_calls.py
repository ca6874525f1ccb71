"""The calls that change what a GPU's memory holds: sleep, and new weights.

In a sleep, weights, KV cache and captured graphs leave the device's memory. Graphs keep addresses,
so they are captured again at the end. All ranks do the same or none does: each step and each
capture is a matter of all of them. New weights are written over the old ones, at the addresses that
the graphs have.
"""

from __future__ import annotations

import abc
import gc

import torch

from sidestep.executor.attention.base import AttentionBackend
from sidestep.executor.gpu.cuda_graphs import CudaGraphs
from sidestep.executor.gpu.step_kernels import StepKernels
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.model_loading import load_model
from sidestep.executor.models.new_weights import TakesWeights, check_same_weights, copy_weights
from sidestep.executor.models.weight_memory import HostCopy, weights_of
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.sleep import SleepingRunner
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.common.errors import EngineStartError
from sidestep.kernels.gpu import gpu_of, like_gpu

_GIB = 1 << 30
_OTHERS = "another rank cannot"
"""A refusal of ranks that could do what another rank cannot."""


class GpuMemoryCalls(StepKernels, TakesWeights, SleepingRunner):
    """The part of a GPU's runner that sleeps, and takes new weights."""

    _graphs: CudaGraphs | None
    _host_copy: HostCopy | None = None
    """The weights during a sleep of level 1."""
    _backend: type[AttentionBackend]
    _num_blocks = 0
    _freed_bytes = 0

    @abc.abstractmethod
    def _make_ready(self) -> None:
        """Forget all requests and capture the graphs."""

    @torch.inference_mode()
    def _free(self, level: int) -> int:
        """Free the cache, the graphs and the weights; level 1 copies the weights to the host."""
        torch.cuda.synchronize()
        problem: str | None = None
        if level == 1:
            try:
                self._host_copy = HostCopy(weights_of(self._model).values())
            except RuntimeError as error:
                problem = f"the host has too little memory: {str(error).splitlines()[0]}"
        try:
            self._agree(problem)
        except CallRefusedError:
            self._host_copy = None
            raise
        free, _ = torch.cuda.mem_get_info(self._device)
        self._backend, self._num_blocks = type(self._attention), self._attention.cache.shape[1]
        self._graphs = None
        del self._attention
        if self._host_copy is not None:
            self._host_copy.free()
        else:
            del self._model
        gc.collect()
        # The library of products keeps memory for each stream that it has run on, which lies in the
        # pool of the graphs that were captured there.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # no build for CPUs has it
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
        self._freed_bytes = torch.cuda.mem_get_info(self._device)[0] - free
        return self._freed_bytes

    @torch.inference_mode()
    def _restore(self, level: int) -> None:
        """Take the memory again, and fill it as it was, but for the cache."""
        problem = self._why_not_yet()
        if problem is None and level == 2:
            try:
                self._load_model()
            except EngineStartError as error:
                problem = str(error)
        try:
            self._agree(problem)
        except CallRefusedError:
            if level == 2 and hasattr(self, "_model"):
                del self._model
                torch.cuda.empty_cache()
            raise
        if self._host_copy is not None:
            self._host_copy.restore()
            self._host_copy = None
        self._attention = self._make_attention(self._backend, self._num_blocks)
        self._make_ready()
        torch.cuda.synchronize()

    def _why_not_yet(self) -> str | None:
        """Return why the device's memory cannot be taken again, or None if it can."""
        free, _ = torch.cuda.mem_get_info(self._device)
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

    @torch.inference_mode()
    def _read_weights(self, args: WorkerArgs) -> DecoderForCausalLM:
        """Return a model in the host's memory, whose weights are those of the one on the GPU."""
        gpu = gpu_of(self._device)
        assert gpu is not None
        with like_gpu(gpu, "cpu"):
            model = load_model(args, self._parallel, self._dtype, torch.device("cpu"))
        check_same_weights(self._model, model)
        return model

    @torch.inference_mode()
    def _use_weights(self, model: DecoderForCausalLM) -> None:
        """Copy the weights, behind the steps that are queued."""
        copy_weights(self._model, model)
