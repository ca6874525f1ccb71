"""The placer `local`, which starts cores as child processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sidestep.frontend.placement.placer import HostStatus, PlacedCore, Placer
from sidestep.ipc.processes.addresses import ClientAddress, new_address
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.cpu_use import CpuUse
from sidestep.ipc.processes.process import Child, kill_child, spawn
from sidestep.ipc.transport.black_box import BlackBox, Recorded, new_memory


class LocalCore(PlacedCore):
    """A core that is a child of this process."""

    def __init__(self, child: Child, box: BlackBox) -> None:
        self._child = child
        self._box = box
        self._use: CpuUse | None = None

    def __repr__(self) -> str:
        return f"LocalCore({self._child!r})"

    @property
    def host(self) -> str | None:
        """None: it is this machine."""
        return None

    @property
    def end_is_of_host(self) -> bool:
        """False: this process would have ended too."""
        return False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def on_death(self, callback: Callable[[str], None]) -> None:
        """Call `callback(cause)` from a watching thread if the core ends before `let_go`."""
        self._child.on_death(callback)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the core to end, and return whether it has."""
        return self._child.wait(timeout_s)

    def death_cause(self) -> str:
        """Return how it ended, as text for users."""
        return self._child.death_cause()

    def link_ended(self) -> None:
        """Do nothing: the end of the process is seen."""

    def let_go(self) -> None:
        """Tell the core to end, and do not wait for it."""
        self._child.let_go()

    def stop(self) -> None:
        """End the core by its lifeline, then by a kill."""
        self._child.stop()

    def kill(self, worker_pids: Sequence[int]) -> None:
        """Kill the workers, then the core."""
        for pid in worker_pids:
            kill_child(pid, self._child.pid)
        self._child.kill()

    def recorded(self) -> Recorded | None:
        """Return what the core has noted."""
        return self._box.read()

    def computes(self, worker_pids: Sequence[int]) -> bool:
        """Return whether its workers have computed on a CPU since the last call."""
        if self._use is None:
            self._use = CpuUse(worker_pids)
        return self._use.has_grown()


def start_core(
    args: CoreArgs, *, remove: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> LocalCore:
    """Start a core as a child process. Raises OSError.

    remove: folders that this process removes itself, and the child if this process cannot. env:
    variables that are added to the environment.
    """
    memory = new_memory()
    try:
        box = BlackBox.of_descriptor(os.dup(memory))
        child = spawn(
            "engine core",
            "sidestep.engine_core.entry:main",
            replace(args, black_box=memory),
            log_config=args.config.logs,
            remove=remove,
            env=env,
            pass_fds=(memory,),
        )
    finally:
        os.close(memory)
    return LocalCore(child, box)


class LocalPlacer(Placer):
    """Starts all cores on this machine."""

    def begin(self) -> None:
        """Do nothing."""

    def new_address(self) -> ClientAddress:
        """Return an address in a private folder."""
        return new_address()

    def place(self, args: CoreArgs) -> PlacedCore:
        """Start a core as a child process."""
        folders = [folder for client in args.clients for folder in client.folders]
        return start_core(args, remove=folders)

    @property
    def hosts(self) -> list[HostStatus]:
        """None: there is no other host."""
        return []

    @property
    def num_refused(self) -> int:
        """0: it listens nowhere."""
        return 0

    def close(self) -> None:
        """Do nothing."""
