"""The cores and relays that an agent has started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sidestep.frontend.placement.local import LocalCore, start_core
from sidestep.frontend.placement.node.model_files import with_local_files
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.hosts.node_messages import (
    CoreEnded,
    EndCore,
    EndRelay,
    FromNode,
    RelayEnded,
    RelayStarted,
    StartCore,
    StartRelay,
    WatchWorkers,
)
from sidestep.ipc.processes.core_args import CoreArgs
from sidestep.ipc.processes.process import Child
from sidestep.ipc.processes.rank_hosts import RelayDoor, start_relay

Order = StartCore | EndCore | WatchWorkers | StartRelay | EndRelay


class Children:
    """Starts and ends processes by orders. All methods belong to the agent's loop."""

    def __init__(
        self,
        address: str,
        tell: Callable[[FromNode], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        """Begin without processes.

        address: where relays listen. tell: sends the head a message. post: has the agent's loop
        call a function; any thread may use it.
        """
        self._address, self._tell, self._post = address, tell, post
        self._expected: set[int] = set()
        """The numbers of cores and relays that begin in another thread."""
        self._cores: dict[int, LocalCore] = {}
        self._relays: dict[int, Child] = {}
        self._watched: dict[int, Sequence[int]] = {}
        """By core: its workers whose CPU time is looked at."""

    def __repr__(self) -> str:
        return f"Children(cores={sorted(self._cores)}, relays={sorted(self._relays)})"

    def obey(self, order: Order) -> None:
        """Carry out an order of the head."""
        if isinstance(order, StartCore):
            self._expected.add(order.core)
            _in_thread(lambda: self._find_model(order))
        elif isinstance(order, EndCore):
            self._end_core(order)
        elif isinstance(order, StartRelay):
            self._expected.add(order.relay)
            _in_thread(lambda: self._start_relay(order))
        elif isinstance(order, EndRelay):
            self._end_relay(order.relay)
        elif order.core in self._cores:
            self._watched[order.core] = order.worker_pids

    def computing(self) -> list[int]:
        """Return the cores whose workers have used CPU time since the last call."""
        return [core for core, pids in self._watched.items() if self._cores[core].computes(pids)]

    def close(self) -> None:
        """End all, and wait for their end."""
        children: list[LocalCore | Child] = [*self._cores.values(), *self._relays.values()]
        for child in children:
            child.let_go()
        for child in children:
            child.stop()

    # Cores.

    def _find_model(self, order: StartCore) -> None:
        """Find the model's files, which may have to be fetched, then have the core started."""
        try:
            args = replace(order.args, config=with_local_files(order.args.config))
        except EngineStartError as error:
            cause = str(error)
            self._post(lambda: self._core_ended(order.core, None, cause))
            return
        self._post(lambda: self._start_core(order, args))

    def _start_core(self, order: StartCore, args: CoreArgs) -> None:
        number = order.core
        if number not in self._expected:
            return  # it has been ended meanwhile
        try:
            core = start_core(args, env=_environment(order.gpus))
        except OSError as error:
            self._core_ended(number, None, f"the engine core cannot be started: {error}")
            return
        self._expected.discard(number)
        self._cores[number] = core
        core.on_death(lambda cause: self._post(lambda: self._core_ended(number, core, cause)))

    def _end_core(self, order: EndCore) -> None:
        core = self._cores.get(order.core)
        if core is None:
            if order.core in self._expected:
                self._core_ended(order.core, None, "it was not needed any more")
        elif order.kills:
            core.kill(order.worker_pids)
        else:

            def end() -> None:
                core.stop()
                self._post(lambda: self._core_ended(order.core, core, core.death_cause()))

            _in_thread(end)

    def _core_ended(self, number: int, core: LocalCore | None, cause: str) -> None:
        """Report the end of a core, once."""
        if number not in self._expected and number not in self._cores:
            return
        self._expected.discard(number)
        self._cores.pop(number, None)
        self._watched.pop(number, None)
        notes = None if core is None else core.recorded()
        now = time.monotonic_ns()
        self._tell(CoreEnded(core=number, cause=cause, now_ns=now, notes=notes))

    # Relays.

    def _start_relay(self, order: StartRelay) -> None:
        try:
            child, door = start_relay(self._address, _environment(order.gpus))
        except (EngineStartError, OSError) as error:
            cause = str(error)
            self._post(lambda: self._relay_ended(order.relay, cause))
            return
        self._post(lambda: self._relay_started(order.relay, child, door))

    def _relay_started(self, number: int, child: Child, door: RelayDoor) -> None:
        if number not in self._expected:  # it has been ended meanwhile
            child.let_go()
            return
        self._expected.discard(number)
        self._relays[number] = child
        self._tell(RelayStarted(relay=number, port=door.port, server_key=door.server_key))
        child.on_death(lambda cause: self._post(lambda: self._relay_ended(number, cause)))

    def _end_relay(self, number: int) -> None:
        child = self._relays.get(number)
        if child is None:
            self._relay_ended(number, "it was not needed any more")
            return

        def end() -> None:
            child.stop()
            self._post(lambda: self._relay_ended(number, child.death_cause()))

        _in_thread(end)

    def _relay_ended(self, number: int, cause: str) -> None:
        """Report the end of a relay, once."""
        if number in self._expected or number in self._relays:
            self._expected.discard(number)
            self._relays.pop(number, None)
            self._tell(RelayEnded(relay=number, cause=cause))


def _environment(gpus: list[str] | None) -> dict[str, str] | None:
    return None if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="order of the head", daemon=True).start()
