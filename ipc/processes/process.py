"""Child processes: started by name, watched for death, never outliving their parent.

`spawn("package.module:function", args)` runs the function in a fresh interpreter. A pipe from the
parent to the child's standard input carries the arguments and then stays open as a lifeline: when
the parent ends, however it ends, the child reads end-of-file and exits at once. Stopping a child is
closing its lifeline. So there is one way to end, it needs no signal handler, and nothing has to be
cleaned up by name: rings are unnamed memory, socket files are removed once connected.

multiprocessing is not used, because its spawn imports the user's main module again in every child
(a script without a `__main__` guard would start engines without end), and pickles.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from sidestep.ipc.common import logs
from sidestep.ipc.common.logs import LogConfig
from sidestep.ipc.processes.forking import Home, keep_from_children, no_forks

T = TypeVar("T")

_LOOK_S = 0.02
"""Seconds between two looks at a process that is to end."""
_BOOTSTRAP = """\
import sys, json, shutil
line = sys.stdin.buffer.readline()
if not line.endswith(b"\\n"):
    for folder in sys.argv[1:-1]:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit()
job = json.loads(line)
sys.path[:] = job["path"]
from sidestep.ipc.processes.process import run_child
run_child(job, sys.argv[1:-1])
"""
"""Program of a child.

Its command line holds the folders to remove, and its name for lists of processes. A child that gets
no whole line of arguments lost its parent before the arguments came, so it removes the folders that
the parent left.
"""


class Child:
    """A running child process, made by `spawn`."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._popen = popen
        self._stopping = False
        self._callbacks: list[Callable[[str], None]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._home = Home()
        keep_from_children(self)

    def __repr__(self) -> str:
        state = self.death_cause() if self._ended.is_set() else "running"
        return f"Child({self.name}, pid={self.pid}, {state})"

    def begin(self, job: bytes) -> None:
        """Send the child its job, and watch it from now on."""
        assert self._popen.stdin is not None
        unsent = memoryview(job)
        with suppress(BrokenPipeError):  # it died at once; the watcher reports how
            while unsent:
                unsent = unsent[self._popen.stdin.write(unsent) :]
        threading.Thread(target=self._watch, name=f"watch {self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """The operating system's process id."""
        return self._popen.pid

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(cause)` from a watching thread if the child ends before `stop`.

        Call it at once if the child has ended already.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        if not self._stopping:
            callback(self.death_cause())

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the child to end, and return whether it has."""
        return self._ended.wait(timeout_s)

    @property
    def exit_status(self) -> int | None:
        """The exit status; negative after a signal, None while the process runs."""
        return self._popen.returncode

    def death_cause(self) -> str:
        """Return how it ended, as text for users."""
        code = self._popen.returncode
        if code is None:
            return f"{self.name} (pid {self.pid}) is still running"
        if code < 0:
            return f"{self.name} (pid {self.pid}) was killed by {signal.Signals(-code).name}"
        return f"{self.name} (pid {self.pid}) exited with status {code}"

    def let_go(self) -> None:
        """Tell the child to end, and do not wait for it.

        Raises SidestepError in a forked copy of the parent.
        """
        self._home.check()
        self._stopping = True
        self._close_lifeline()

    def kill(self) -> None:
        """Kill the child, and do not wait for its end. `on_death` reports it."""
        self._home.check()
        self._popen.kill()

    def stop(self, timeout_s: float = 3.0) -> None:
        """End the child, by its lifeline first, then by a kill. May be called twice.

        timeout_s: seconds to wait after each of the two.
        """
        self.let_go()
        if not self._ended.wait(timeout_s):
            self._popen.kill()
            self._ended.wait(timeout_s)

    def _close_lifeline(self) -> None:
        assert self._popen.stdin is not None
        with no_forks:
            self._popen.stdin.close()

    def leave_to_parent(self) -> None:
        """Close a forked process's copy of the lifeline.

        The forked process must neither wait for the child nor end it.
        """
        self._close_lifeline()
        # Without a return code Popen would warn of a child that still runs when it is collected.
        self._popen.returncode = 0

    def _watch(self) -> None:
        self._popen.wait()
        self._close_lifeline()
        with self._lock:
            self._ended.set()
            callbacks = [] if self._stopping else list(self._callbacks)
        for callback in callbacks:
            callback(self.death_cause())


def spawn(
    name: str,
    target: str,
    args: Any,
    *,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    remove: Sequence[str] = (),
    log_config: LogConfig | None = None,
) -> Child:
    """Run `target` ("module:function") in a new process, and return the process.

    The function gets `args` as JSON bytes (see `decode_args`). `env` adds to the environment;
    `pass_fds` are inherited under their own numbers. The child is in a process group of its own, so
    that Ctrl-C in a terminal reaches only the program that owns the engine. `remove` names folders
    that the parent removes itself; the child removes them when the parent ends, because the parent
    may be killed first. The child logs as this process does, unless `log_config` is given.
    """
    with no_forks:  # until keep_from_children has the child
        popen = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *remove, name],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=tuple(pass_fds),
            process_group=0,
            bufsize=0,
            env={**os.environ, **env} if env else None,
        )
        child = Child(name, popen)
    job = {
        "path": sys.path,
        "target": target,
        "args": msgspec.json.encode(args).decode(),
        "name": name,
        "logs": asdict(log_config or logs.current()),
    }
    child.begin(json.dumps(job).encode() + b"\n")
    return child


def decode_args(raw: bytes, cls: type[T]) -> T:
    """Return the arguments that the parent gave to `spawn`."""
    return msgspec.json.decode(raw, type=cls)


def run_child(job: dict[str, Any], remove: Sequence[str]) -> None:
    """Run a child process. This is its main function. remove: folders that its parent may leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Service managers send SIGTERM to every process of a service. While the program's own process
    # drains, it needs the engine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(remove,), name="lifeline", daemon=True).start()
    logs.begin(LogConfig(**job["logs"]), job["name"])
    logs.own_process()
    module, _, function = job["target"].partition(":")
    getattr(importlib.import_module(module), function)(job["args"].encode())


def end_with_parent(remove: Sequence[str] = ()) -> None:
    """Wait until the lifeline is cut, remove the parent's folders, and end this process.

    remove: folders that the parent may have left.
    """
    while os.read(0, 4096):
        pass
    for folder in remove:
        shutil.rmtree(folder, ignore_errors=True)
    # sys.exit would not end it: the main thread may be inside a device call that never returns.
    os._exit(0)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import without the garbage collector, and hide from it what there is at the end.

    Modules stay. The collector, which looks through their objects again and again, takes a sixth of
    torch's import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_heap() -> None:
    """Hide all living objects from the garbage collector.

    This keeps the collector's pauses out of the step path.
    """
    gc.collect()
    gc.freeze()


def is_running(pid: int) -> bool:
    """Return whether a process exists and has not ended: nobody may wait for one that has."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        if os.path.exists("/proc/self/stat"):
            return False
    return process_exists(pid)


def wait_for_end(pids: Iterable[int], timeout_s: float = math.inf) -> int | None:
    """Wait for processes to end; return None, or the first one that has not ended in time.

    They need not be children of this process.
    """
    until = time.monotonic() + timeout_s
    while (left := next(filter(is_running, pids), None)) is not None:
        if time.monotonic() > until:
            return left
        time.sleep(_LOOK_S)
    return None


def kill_child(pid: int, parent: int) -> None:
    """Kill a child of another process. Nothing happens if it has ended, or has another parent."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            is_child = int(file.read().rpartition(b")")[2].split()[1]) == parent
    except OSError:
        is_child = not os.path.exists("/proc/self/stat")
    if is_child:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def process_exists(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def cpu_seconds(pid: int) -> float | None:
    """Return the seconds of CPU time that a process has used, all its threads together.

    None where the system does not report it (no /proc).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Deadline:
    """Time left of a limit, for waits that are made of several."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def left(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())
