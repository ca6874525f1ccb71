"""A step that has been launched on a GPU, and its output."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sidestep.executor.gpu.apart_rows import QueryLogprobs
from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.gpu.token_sampler import TokenSampler
from sidestep.executor.runner.runner import PendingOutput
from sidestep.executor.sampling.token_logprobs import Logprobs, encode_logprobs
from sidestep.ipc.transport.step import Int32, StepOutput


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step in pinned memory, until its buffers are used again."""

    sampler: TokenSampler
    position: int
    """Index of the step's buffers."""
    samples: npt.NDArray[np.bool_]
    """[R] Rows that sample."""
    queries: int
    """Tokens that each of them may have."""
    logprobs: list[QueryLogprobs]
    prompt_logprobs: list[Logprobs]
    next_drafts: Tensor | None
    """int32 [R, 1 + K] The number of drafts of each row's slot for the next step, and the drafts;
    None if nobody needs to know."""

    def tell(self, output: StepOutput) -> None:
        """Add the tokens, and what belongs to them, to the output of a step that has ended."""
        rows = self.sampler.sampled_rows(self.position, self.samples, self.queries)
        rows.tell(output)
        output.logprobs = encode_logprobs(
            [part.counted(rows.sizes) for part in self.logprobs]
            if self.queries > 1
            else [part.of_rows for part in self.logprobs]
        )
        output.prompt_logprobs = encode_logprobs(self.prompt_logprobs)
        if self.next_drafts is not None:
            drafts: Int32 = self.next_drafts.numpy()[self.samples]
            output.next_sizes = drafts[:, 0]
            output.next_drafts = drafts[:, 1:][np.arange(drafts.shape[1] - 1) < drafts[:, :1]]


@dataclass(frozen=True, slots=True)
class PooledResult:
    """The vectors of a step, in pinned memory once the step has ended."""

    vectors: Tensor
    """float32 [S, W]"""

    def tell(self, output: StepOutput) -> None:
        """Add the vectors to the output of a step that has ended."""
        output.vectors = self.vectors.numpy().reshape(-1)


class GpuOutput(PendingOutput):
    """A step that runs on the device or is queued there."""

    def __init__(
        self,
        step_id: int,
        result: StepResult | PooledResult | None,
        started: torch.cuda.Event,
        done: torch.cuda.Event,
        clock: DeviceClock,
    ) -> None:
        """Wait for nothing yet. result: None in a stage that is not the last."""
        self._step_id = step_id
        self._result = result
        self._started = started
        self._done = done
        self._clock = clock

    @property
    def ready(self) -> bool:
        """Whether the device has ended the step."""
        return bool(self._done.query())

    def wait(self) -> StepOutput:
        """Wait until the device has ended the step, and return its output."""
        self._done.synchronize()
        start, end = self._clock.times(self._started, self._done, time.monotonic_ns())
        output = StepOutput(self._step_id, start, end, np.empty(0, np.int32))
        if self._result is not None:
            self._result.tell(output)
        return output
