"""Masks computed by threads, so that those who wait for them need not wait for the slowest.

Requests that share a compilation take turns in it, so their masks are one job. Most masks take microseconds; a few take
longer than a step of a small model. Whoever needs the masks of a step waits for all jobs for a time, and then no longer
than until few rows are left. A job that is late goes on, and is there when a later step asks again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from sidestep.engine_core.request import Request
from sidestep.ipc.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_JOBS_A_THREAD = 2


@dataclass(slots=True, eq=False)
class MaskJob:
    """Masks of some requests, all that share a compilation among them."""

    matchers: list[tuple[LLMatcher, int]]
    """With their rows in `masks`; nothing else may touch them until the job is done."""
    masks: Int32
    """[n, ceil(vocab_size / 32)] A bit a token, the lowest first."""
    num_left: int
    """Masks that nobody has taken yet."""
    is_done: bool = False

    def run(self, executor: LLExecutor | None) -> None:
        """executor: shares the work out among threads of its own."""
        start, size = self.masks.ctypes.data, self.masks.shape[1] * 4
        if executor is not None:
            executor.unsafe_compute_mask_ptr(self.matchers, start, size, len(self.masks))
        else:
            for matcher, row in self.matchers:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)


class MaskJobs:
    """The threads, and what they have to do. All methods are for one thread."""

    def __init__(self, num_words: int, executor: LLExecutor | None, num_threads: int) -> None:
        """num_threads: 0 if masks are computed when they are asked for, and nothing is ever late."""
        self._num_words = num_words
        self._executor = executor
        self._num_threads = num_threads
        self._has_threads = False
        self._jobs: queue.SimpleQueue[MaskJob] = queue.SimpleQueue()
        self._free: list[Int32] = []
        self._taken: list[Int32] = []
        """Memory that jobs no longer need, and that of masks which were taken last."""
        self._ended = threading.Condition()
        self._awaited: set[MaskJob] = set()
        self._is_impatient = False
        """Whether each job's end is of interest, not the last one's alone."""

    def __repr__(self) -> str:
        return f"MaskJobs({self._num_threads} threads)"

    def start(self, requests: Sequence[Request]) -> None:
        """Has the masks of requests computed, unless that is under way."""
        self._free, self._taken = self._taken, []
        for members in self._share_out([r for r in requests if r.mask_job is None]):
            masks = next((m for m in self._free if len(m) == len(members)), None)
            if masks is None:
                masks = np.empty((len(members), self._num_words), np.int32)
            else:
                self._free = [m for m in self._free if m is not masks]
            job = MaskJob([(r.matcher, i) for i, r in enumerate(members) if r.matcher is not None], masks, len(members))
            for i, request in enumerate(members):
                request.mask_job, request.mask_row = job, i
            if self._num_threads:
                self._start_threads()
                self._jobs.put(job)
            else:
                job.run(self._executor)
                job.is_done = True

    def _share_out(self, requests: Sequence[Request]) -> list[list[Request]]:
        """By compilation, and no more parts than keep the threads busy: each costs a thread's waking."""
        groups: dict[int, list[Request]] = {}
        for request in requests:
            groups.setdefault(request.matcher_group, []).append(request)
        parts = list(groups.values())
        most = max(1, _JOBS_A_THREAD * self._num_threads)
        return [list(chain.from_iterable(parts[i::most])) for i in range(min(most, len(parts)))]

    def wait(self, requests: Sequence[Request], may_be_late: Sequence[bool], most_late: int, patience_s: float) -> None:
        """Until the masks of all are there; after some seconds, until those are that may not be late, and of the others
        all but a number."""
        def pending(count_all: bool) -> int:
            return sum(count_all or not late for r, late in zip(requests, may_be_late, strict=True)
                       if r.mask_job is not None and not r.mask_job.is_done)

        if not self._num_threads:
            return
        with self._ended:
            self._awaited = {r.mask_job for r in requests if r.mask_job is not None and not r.mask_job.is_done}
            self._is_impatient = False
            if not self._ended.wait_for(lambda: not self._awaited, patience_s):
                self._is_impatient = True
                self._ended.wait_for(lambda: not pending(False) and pending(True) <= most_late)

    def take(self, request: Request) -> Int32 | None:
        """The request's mask, valid until the next `start`; None if it is late."""
        job = request.mask_job
        assert job is not None, f"{request}: nobody computes its mask"
        if not job.is_done:
            return None
        request.mask_job = None
        job.num_left -= 1
        if not job.num_left:
            self._taken.append(job.masks)
        mask: Int32 = job.masks[request.mask_row]
        return mask

    def _start_threads(self) -> None:
        if not self._has_threads:
            self._has_threads = True
            for i in range(self._num_threads):
                threading.Thread(target=self._run, name=f"masks {i}", daemon=True).start()

    def _run(self) -> None:
        """A thread's work, until the process ends."""
        while True:
            job = self._jobs.get()
            job.run(self._executor)
            with self._ended:
                job.is_done = True
                self._awaited.discard(job)
                if self._is_impatient or not self._awaited:
                    self._ended.notify()
