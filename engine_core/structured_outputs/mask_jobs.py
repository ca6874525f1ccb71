"""Masks of a step, without waiting for the slowest.

Most masks take microseconds; a few take longer than a step of a small model, and a hostile
grammar's may all do so. A step waits for all of its masks at first, then until few rows lack
theirs, and after the longest time for none. The requests of a grammar are one job. If a job has
more rows than may be late, the caller computes it row by row until the longest time is over; a
later step that asks for the remaining rows begins them anew. Threads compute the other jobs. A late
job of a thread goes on, and a later step takes its masks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.mask_job import FOREVER, MaskJob
from sidestep.ipc.transport.step import Int32

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MOST_JOBS = 8
"""Jobs that a step begins at most.

Each job costs the waking of a thread. With more grammars, some share a job.
"""


class MaskJobs:
    """The threads that compute masks, and their jobs. `compute` is for one thread."""

    def __init__(self, num_words: int, executor: LLExecutor | None, num_threads: int = 1) -> None:
        """Begin without threads; the first job for a thread starts them.

        executor: has `num_threads` threads; None if the caller of `compute` computes all masks.
        """
        self._num_words = num_words
        self._executor = executor
        self._num_threads = num_threads
        self._has_threads = False
        self._jobs: queue.SimpleQueue[MaskJob] = queue.SimpleQueue()
        self._free: list[Int32] = []
        self._taken: list[Int32] = []
        """Memory of jobs whose masks were all taken in this call; the next call may reuse it."""
        self._ended = threading.Condition()
        self._awaited: set[MaskJob] = set()
        self._is_impatient = False
        """Whether each job's end wakes the waiting thread, and not only the last one's."""

    def __repr__(self) -> str:
        return f"MaskJobs({len(self._awaited)} awaited)"

    def compute(
        self, grammars: Sequence[GrammarState], most_late: int, patience_s: float, longest_s: float
    ) -> list[Int32 | None]:
        """Return the mask of each grammar, valid until the next call; None for a late mask.

        Each grammar is one request's. A later call returns the late masks. Until `patience_s` is
        over wait for all masks, then until at most `most_late` are late, and no longer than
        `longest_s`. Raise what the library raises.
        """
        start = time.monotonic()
        self._free, self._taken = self._taken, []
        own = []
        for job in self._make([grammar for grammar in grammars if grammar.job is None]):
            if self._executor is None or job.num_left > most_late:
                own.append(job)
            else:
                self._start_threads()
                self._jobs.put(job)
        for i, job in enumerate(own):
            # The first job runs in any case, so that each step makes progress.
            if i == 0 or time.monotonic() < start + longest_s:
                job.run(self._executor, self._num_threads, start + longest_s)
            job.end()
        self._wait(grammars, most_late, start + patience_s, start + longest_s)
        return [self._take(grammar) for grammar in grammars]

    def _make(self, asking: Sequence[GrammarState]) -> list[MaskJob]:
        """Return a job for each grammar, or for several grammars where there are many.

        Jobs of cheap masks come first.
        """
        by_text: dict[str, list[GrammarState]] = {}
        for grammar in asking:
            by_text.setdefault(grammar.text, []).append(grammar)
        parts = list(by_text.values())
        if len(parts) > 1:
            parts.sort(key=lambda part: part[0].mask_s)
        jobs = []
        for part in (
            list(chain.from_iterable(parts[i::_MOST_JOBS]))
            for i in range(min(_MOST_JOBS, len(parts)))
        ):
            # Requests that share a compilation stand side by side: most often one thread has them.
            members = sorted(part, key=lambda grammar: grammar.compilation)
            job = MaskJob(
                [(g.matcher, i) for i, g in enumerate(members) if g.matcher is not None],
                self._memory(len(members)),
                len(members),
            )
            for i, grammar in enumerate(members):
                grammar.ask(job, i)
            jobs.append(job)
        return jobs

    def _memory(self, count: int) -> Int32:
        for i, masks in enumerate(self._free):
            if len(masks) == count:
                return self._free.pop(i)
        return np.empty((count, self._num_words), np.int32)

    def _wait(
        self, grammars: Sequence[GrammarState], most_late: int, until: float, at_most_until: float
    ) -> None:
        """Wait until all masks are computed; after `until`, until all but `most_late` are.

        Do not wait beyond `at_most_until`. Both are times of the monotonic clock.
        """
        jobs = [grammar.job for grammar in grammars]
        with self._ended:
            self._awaited = {job for job in jobs if job is not None and not job.is_done}
            self._is_impatient = False
            if not self._ended.wait_for(lambda: not self._awaited, until - time.monotonic()):
                self._is_impatient = True
                left = None if at_most_until == FOREVER else at_most_until - time.monotonic()
                self._ended.wait_for(
                    lambda: sum(job in self._awaited for job in jobs) <= most_late, left
                )

    def _take(self, grammar: GrammarState) -> Int32 | None:
        job = grammar.job
        assert job is not None, f"{grammar}: nobody computes its mask"
        if not job.is_done:
            return None
        if job.error is not None:
            raise job.error
        if job.mask_taken():
            self._taken.append(job.masks)
        return grammar.take_mask()

    def _start_threads(self) -> None:
        if not self._has_threads:
            self._has_threads = True
            for i in range(_MOST_JOBS):
                threading.Thread(target=self._run, name=f"masks {i}", daemon=True).start()

    def _run(self) -> None:
        """Run a thread's jobs, until the process ends."""
        while True:
            job = self._jobs.get()
            problem: BaseException | None = None
            try:
                job.run(self._executor, self._num_threads)
            # A panic of the library is a BaseException, and the waiting thread must get it.
            except BaseException as error:
                problem = error
            with self._ended:
                job.end(problem)
                self._awaited.discard(job)
                if self._is_impatient or not self._awaited:
                    self._ended.notify()
