"""A step that has been launched on a GPU, and its output."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sidestep.executor.gpu.device_clock import DeviceClock
from sidestep.executor.runner.runner import PendingOutput
from sidestep.executor.sampling.token_logprobs import Logprobs, encode_logprobs
from sidestep.ipc.transport.step import Int32, Int64, StepOutput


@dataclass(frozen=True, slots=True)
class SpecialOutput:
    """Ids and log-probabilities of a step's special rows, in pinned memory."""

    rows: Int64
    ids: Int32
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs]


class GpuOutput(PendingOutput):
    """A step that runs on the device or is queued there."""

    def __init__(
        self,
        step_id: int,
        ids: Int32,
        samples: npt.NDArray[np.bool_],
        special: SpecialOutput | None,
        started: torch.cuda.Event,
        done: torch.cuda.Event,
        clock: DeviceClock,
    ) -> None:
        self._step_id = step_id
        self._ids = ids
        self._samples = samples
        self._special = special
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
        ids, special = self._ids[: len(self._samples)], self._special
        if special is None:
            return StepOutput(self._step_id, start, end, ids[self._samples])
        ids[special.rows] = special.ids
        return StepOutput(
            self._step_id,
            start,
            end,
            ids[self._samples],
            logprobs=encode_logprobs(special.logprobs),
            prompt_logprobs=encode_logprobs(special.prompt_logprobs),
        )
