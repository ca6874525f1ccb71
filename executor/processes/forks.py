"""Compilation of kernels in forks of a process, each started as soon as its kernel is known.

Most of a compilation holds the interpreter's lock, so threads do not help much. A process that is
not forked would take seconds to import what this process has imported. The forking process must
have no context on a GPU, and no other threads that hold locks.
"""

from __future__ import annotations

import fcntl
import os
import threading
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NoReturn

from sidestep.ipc.processes.process import end_with_parent
from sidestep.kernels.compiling import Compilation, Locks


class Forks(Executor):
    """Compiles in up to `num_processes` forks at a time."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._num_submitted = 0
        self._running: set[int] = set()
        self._locks = Locks()
        self._results = os.memfd_create("results")
        """A line of each fork: a file, or what went wrong."""
        # Forks share the place where they write. Only lines that are appended overwrite no others.
        fcntl.fcntl(self._results, fcntl.F_SETFL, os.O_APPEND)

    def submit(self, compilation: Compilation, /, *_: Any, **__: Any) -> Future[Any]:
        """Compile in a fork, once fewer than `num_processes` run.

        The future that is returned is done already; its result is None.
        """
        while len(self._running) >= self._num_processes:
            self._wait_for_one()
        child = os.fork()
        if child == 0:
            self._compile(compilation)
        self._running.add(child)
        self._num_submitted += 1
        done: Future[Any] = Future()
        done.set_result(None)
        return done

    def finish(self) -> list[str]:
        """Wait for all forks, and return a file of each kernel in Triton's cache.

        Raises RuntimeError if one failed.
        """
        while self._running:
            self._wait_for_one()
        lines = os.pread(self._results, os.fstat(self._results).st_size, 0).decode().splitlines()
        files = [line for line in lines if os.path.isabs(line)]
        if len(files) != self._num_submitted:
            problems = [line for line in lines if line not in files] or ["killed"]
            raise RuntimeError(
                f"{self._num_submitted - len(files)} of {self._num_submitted} failed: {problems[0]}"
            )
        return files

    def _wait_for_one(self) -> None:
        self._running.discard(os.wait()[0])

    def _compile(self, compilation: Compilation) -> NoReturn:
        """Compile, report and exit: all that a fork does.

        The fork ends with the engine, as its parent does.
        """
        try:
            threading.Thread(target=end_with_parent, daemon=True).start()
            kernel = compilation()
            if not isinstance(kernel, Path):  # as those in CUDA C++ are
                kernel = _file_of(self._locks.with_launcher(kernel))
            os.write(self._results, f"{os.path.abspath(kernel)}\n".encode())
        except BaseException as error:
            os.write(
                self._results, f"{type(error).__name__}: {' '.join(str(error).split())}\n".encode()
            )
        finally:
            os._exit(0)


def _file_of(kernel: Any) -> Path:
    """Return a file of one of Triton's kernels in the cache."""
    files = map(Path, kernel.metadata_group.values())
    (file,) = (path for path in files if path.name == f"{kernel.name}.json")
    return file
