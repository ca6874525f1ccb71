"""A GPU's runner without a GPU.

Its tensors are on the CPU, its kernels run in Triton's interpreter, and calls of torch.cuda are
done at once. All code around the kernels is so tested where there is no GPU: the contents of a
step's message, the kernels that a step launches, padding, graphs, and rows that are sampled apart.
The kernels' order on several streams and memory are not tested. The second half of the module has
helpers that several tests use with such runners.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from sidestep.executor.gpu import cuda_graphs, warm_up
from sidestep.executor.gpu.cuda_graphs import CudaGraphs, StepSizes
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.logits_controls import Controls
from sidestep.kernels import gpu
from sidestep.kernels.gpu import Gpu, stand_for
from sidestep.kernels.triton.prepare_step_triton import StepLayout
from tests.e2e.models import random_prompts
from tests.triton.support import PoisonedAllocations
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import VOCAB

MEMORY = 1 << 30
PROCESSORS = 2
"""Number of programs, as small as in the other interpreted tests."""


class Event:
    """An event of a device that has done all its work."""

    def __init__(self, **_: bool) -> None:
        self._ns = 0

    def record(self) -> None:
        self._ns = time.monotonic_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self._ns, "nobody has recorded it"

    def elapsed_time(self, end: Event) -> float:
        return (end._ns - self._ns) / 1e6


class Stream:
    """A stream; there is only one."""

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """A graph: it records the launches of its capture, and is empty until it is replayed."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.replay: Callable[[], object] = lambda: None

    def capture_begin(self, **_: object) -> None:
        Graph.capturing = self

    def capture_end(self) -> None:
        Graph.capturing = None


class Graphs(CudaGraphs):
    """Graphs that launch a step of their sizes again, from the device's memory alone."""

    def __init__(self, run: Callable[[StepSizes, StepLayout], object]) -> None:
        def note(sizes: StepSizes, layout: StepLayout) -> None:
            assert Graph.capturing is not None
            Graph.capturing.replay = lambda: run(sizes, layout)

        super().__init__(note)


@contextmanager
def standing_in() -> Iterator[None]:
    """Let tensors on the CPU stand for those on a GPU, also for runners that are made meanwhile.

    Ranks communicate through gloo.
    Uninitialised tensors come poisoned, so that no result may depend on them, and between margins,
    which are checked on leaving.
    """
    with pytest.MonkeyPatch.context() as patch, PoisonedAllocations():
        nothing = {
            name: lambda *_: None
            for name in (
                "set_device",
                "synchronize",
                "empty_cache",
                "reset_peak_memory_stats",
                "graph_pool_handle",
            )
        }
        answers: dict[str, Any] = {
            **nothing,
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "stream": lambda _: nullcontext(),
            "memory_allocated": lambda: 0,
            "max_memory_allocated": lambda: 0,
            "memory_reserved": lambda: 0,
            "mem_get_info": lambda _: (MEMORY, MEMORY),
            "get_device_name": lambda _: "a stand-in",
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        patch.setattr(cuda_graphs, "CudaGraphs", Graphs)
        # There is nothing to compile. tests/triton/compiling/test_compile_ahead.py shows that all
        # of it can be launched.
        patch.setattr(warm_up, "compiling_only", lambda _: nullcontext())
        patch.setattr(warm_up, "launch_all", lambda *_: None)
        patch.setattr(gpu, "_stand_ins", {})
        stand_for(Gpu(80, PROCESSORS), "cpu")
        try:
            yield
        finally:
            gpu.gpu_of.cache_clear()


def speculative(drafts: int) -> dict[str, Any]:
    """Return a configuration that always verifies this many drafts, if a slot has them."""
    return {
        "num_speculative_tokens": drafts,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "adaptive": False,
    }


def worker_args(path: str, drafts: int = 0, **parallel: Any) -> WorkerArgs:
    return WorkerArgs(
        rank=0,
        spec=load_model_spec(path),
        model=ModelConfig(model=path, dtype="float32"),
        cache=CacheConfig(block_size=16, num_kv_blocks=30),
        parallel=ParallelConfig(device="cpu", attention_backend="triton", **parallel),
        scheduler=SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=24 if drafts else 12,
            speculative_config=speculative(drafts) if drafts else None,
        ),
        max_model_len=48,
    )


CONTROLS = [
    Controls(),
    Controls(logit_bias={7: 30.0}, presence_penalty=60.0),
    Controls(logprobs=2, prompt_logprobs=1),
    Controls(),
    Controls(allowed_token_ids=[5, 6, 7], repetition_penalty=1.5),
]


def mixed_requests() -> list[Request]:
    """Return requests of many kinds: greedy or not, plain or not, one that must not end yet."""
    return [
        Request(
            prompt,
            3,
            temperature=[0.0, 0.9][i // 2 % 2],
            top_k=[0, 9][i % 2],
            top_p=[1.0, 0.8][i // 3],
            seed=i,
            min_tokens=2 * (i == 3),
            stop_ids=range(200) if i == 3 else (),
            controls=CONTROLS[i],
        )
        for i, prompt in enumerate(random_prompts(5, VOCAB, longest=20, seed=5))
    ]
