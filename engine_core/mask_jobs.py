"""Masks of a step, without waiting for the slowest.

Most masks take microseconds; a few take longer than a step of a small model, and a hostile grammar's may all do so. A
step waits for all of its masks for a time, and then no longer than until few rows are left. So the requests of a
grammar are a job. One with so many rows that the step would wait for it in any case is computed by the caller; the
others by threads, and one that is late goes on, and is there when a later step asks again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from sidestep.engine_core.request import Request
from sidestep.ipc.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_JOBS = 8
"""That a step begins: each costs the waking of a thread. Of more grammars some share one."""


@dataclass(slots=True, eq=False)
class MaskJob:
    """Masks of some requests, all of a grammar among them."""

    matchers: list[tuple[LLMatcher, int]]
    """With their rows in `masks`; nothing else may touch them until the job is done."""
    masks: Int32
    """[n, ceil(vocab_size / 32)] A bit a token, the lowest first."""
    num_left: int
    """Masks that nobody has taken yet."""
    is_done: bool = False
    error: BaseException | None = None
    """What the library raised, if it did."""

    def run(self, executor: LLExecutor | None) -> None:
        """executor: shares the work out among threads of its own."""
        start, size = self.masks.ctypes.data, self.masks.shape[1] * 4
        if executor is not None:
            executor.unsafe_compute_mask_ptr(self.matchers, start, size, len(self.masks))
        else:
            for matcher, row in self.matchers:
                matcher.unsafe_compute_mask_ptr(start + row * size, size)


class MaskJobs:
    """The threads, and what they have to do. `compute` is for one thread."""

    def __init__(self, num_words: int, executor: LLExecutor | None) -> None:
        """executor: None if all masks are computed by the caller, and nothing is ever late."""
        self._num_words = num_words
        self._executor = executor
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
        return f"MaskJobs({len(self._awaited)} awaited)"

    def compute(self, requests: Sequence[Request], may_be_late: Sequence[bool], most_late: int,
                patience_s: float) -> list[Int32 | None]:
        """The mask of each, valid until the next call. None for some of those that may be late, at most so many, if
        theirs are not there after so many seconds; a later call gives them. Raises what the library does."""
        until = time.monotonic() + patience_s
        self._free, self._taken = self._taken, []
        own = []
        for job in self._make([request for request in requests if request.mask_job is None]):
            if self._executor is None or job.num_left > most_late:
                own.append(job)
            else:
                self._start_threads()
                self._jobs.put(job)
        for job in own:
            job.run(self._executor)
            job.is_done = True
        self._wait(requests, may_be_late, most_late, until)
        return [self._take(request) for request in requests]

    def _make(self, requests: Sequence[Request]) -> list[MaskJob]:
        """A job for each grammar; for several, where there are many."""
        grammars: dict[str, list[Request]] = {}
        for request in requests:
            grammars.setdefault(request.grammar_text, []).append(request)
        parts = list(grammars.values())
        jobs = []
        for part in (list(chain.from_iterable(parts[i::_MOST_JOBS])) for i in range(min(_MOST_JOBS, len(parts)))):
            # Side by side, those that share a compilation are most often one thread's.
            members = sorted(part, key=lambda request: request.matcher_group)
            job = MaskJob([(r.matcher, i) for i, r in enumerate(members) if r.matcher is not None],
                          self._memory(len(members)), len(members))
            for i, request in enumerate(members):
                request.mask_job, request.mask_row = job, i
            jobs.append(job)
        return jobs

    def _memory(self, count: int) -> Int32:
        for i, masks in enumerate(self._free):
            if len(masks) == count:
                return self._free.pop(i)
        return np.empty((count, self._num_words), np.int32)

    def _wait(self, requests: Sequence[Request], may_be_late: Sequence[bool], most_late: int, until: float) -> None:
        """Until all masks are there; later, until those are that may not be late, and all but some of the others."""
        jobs = [request.mask_job for request in requests]

        def is_enough() -> bool:
            left = [late for job, late in zip(jobs, may_be_late, strict=True) if job in self._awaited]
            return all(left) and len(left) <= most_late

        with self._ended:
            self._awaited = {job for job in jobs if job is not None and not job.is_done}
            self._is_impatient = False
            if not self._ended.wait_for(lambda: not self._awaited, until - time.monotonic()):
                self._is_impatient = True
                self._ended.wait_for(is_enough)

    def _take(self, request: Request) -> Int32 | None:
        job = request.mask_job
        assert job is not None, f"{request}: nobody computes its mask"
        if not job.is_done:
            return None
        if job.error is not None:
            raise job.error
        request.mask_job = None
        job.num_left -= 1
        if not job.num_left:
            self._taken.append(job.masks)
        mask: Int32 = job.masks[request.mask_row]
        return mask

    def _start_threads(self) -> None:
        if not self._has_threads:
            self._has_threads = True
            for i in range(_MOST_JOBS):
                threading.Thread(target=self._run, name=f"masks {i}", daemon=True).start()

    def _run(self) -> None:
        """A thread's work, until the process ends."""
        while True:
            job = self._jobs.get()
            try:
                job.run(self._executor)
            except BaseException as error:  # a panic of the library is one; whoever waits for the job must hear of it
                job.error = error
            with self._ended:
                job.is_done = True
                self._awaited.discard(job)
                if self._is_impatient or not self._awaited:
                    self._ended.notify()
