"""The replicas of one engine as one: requests are routed to them and outlive a replica's death.

Each replica is an engine core with its workers. Handles are this frontend's and unique over all
replicas, so the receiver of outputs need not know which replica sent them.

When a replica dies, its last messages are read first, and it begins to be started again (see
supervisor.py). Each of its requests goes to another replica, with the tokens that it has produced
(dispatcher.py). It enters there as a preempted request enters again, so its reader sees a pause and
the same tokens. Where no replica serves, requests wait for the first that does, and so do new ones.
After a death, every message of the dead core is ignored. A request that had begun may be the cause
of the death, and must not end all replicas: it runs again in probation (probation/probation.py).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.placement.make_placer import make_placer
from sidestep.frontend.placement.placer import Placer
from sidestep.frontend.replicas.crash_file import CrashFiles
from sidestep.frontend.replicas.dispatcher import Dispatcher
from sidestep.frontend.replicas.engine_client import Channel, Death, EngineClient
from sidestep.frontend.replicas.guests import Guests
from sidestep.frontend.replicas.membership import Membership
from sidestep.frontend.replicas.probation.branch import Branch
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.replicas.stall_watch import SILENT, CpuWorkers, StallWatch
from sidestep.frontend.replicas.supervisor import GuestSupervisor, OwnSupervisor, Supervisor
from sidestep.frontend.routing.engine_router import make_router
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStartError,
    SidestepError,
)
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.addresses import remove_address
from sidestep.ipc.processes.core_args import Invitation, Seat
from sidestep.ipc.processes.forking import Home
from sidestep.ipc.transport.channels import FrontendChannel
from sidestep.ipc.transport.messages import (
    AddRequest,
    Outputs,
    Ready,
)
from sidestep.ipc.transport.owner_line import Blamed, Claimed, GuestEnd, Parked, Turn

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds of one round of waiting for the first message of all replicas together."""
_OTHERS_S = 5.0
"""Seconds that the other replicas have for their first message to a frontend that joins.

They run already, but one of them may have died.
"""


class ReplicaSet(Membership):
    """All replicas of one engine.

    The methods belong to the event loop's thread, except those that start and end.
    """

    def __init__(
        self,
        config: EngineConfig,
        outputs: OutputProcessor,
        channels: Mapping[int, tuple[Channel, int]],
        *,
        line: GuestEnd | None = None,
        dead: Mapping[int, str] | None = None,
        absent: Iterable[int] = (),
        placer: Placer | None = None,
        open_channel: Callable[[], Channel] | None = None,
    ) -> None:
        """Make the clients of the replicas, without starting any.

        outputs: receives all outputs. channels: the channels to the live replicas by their numbers,
        each with this frontend's number there. line: the line to the owner of the engine, if
        another frontend owns it. dead: the replicas that stay dead, each with the cause. absent:
        those that the load does not need now.
        placer: starts the cores. open_channel: makes the channel to a core that is started again.
        """
        self.home = Home()
        self._config = config
        self._outputs = outputs
        self._joins = line is not None
        self.placer = placer if placer is not None else make_placer(config)
        self._size = config.parallel.most_replicas
        self._clients = {
            replica: self._make_client(replica, *channel) for replica, channel in channels.items()
        }
        self._ready: dict[int, Ready] = {}
        self._alive: list[int] = []
        self._dead = dict(dead or {})
        num_at_start = config.parallel.data_parallel_size
        self._absent = set(absent if self._joins else range(num_at_start, self._size))
        self._leaving = set()
        self._restarting = {
            replica: "had died before this frontend joined"
            for replica in range(self._size)
            if replica not in channels and replica not in {*self._dead, *self._absent}
        }
        self._guests = self._make_guests()
        self._supervisor = self._make_supervisor(line, open_channel)
        self._keeper = self._make_keeper(None if line is None else line.tell)
        self._branch = self._guests.listener = Branch(self._supervisor, self._guests)
        self.counts = RecoveryCounts()
        self._error: EngineDeadError | None = None
        self._dispatcher: Dispatcher | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retired: list[EngineClient] = []
        """The clients of cores that have died, whose processes may still be ending."""
        self._closed = False
        self._asked = Counter()
        self._watchers: set[asyncio.Future[None]] = set()
        """Futures of the tasks that wait for a replica to serve, or for the engine's death."""
        self._watch = StallWatch(
            lambda replica: self._clients[replica].ping(),
            lambda: self._requests.busy | self._owing,
            self._on_stall,
            lambda replica, cause: self._clients[replica].kill(self._ready[replica], cause),
            CpuWorkers(self._ready, self._core_of, config.placement.placer == "local").compute,
            0.0 if self._joins else config.frontend.stall_limit,
        )

    def _make_guests(self) -> Guests:
        return Guests(
            self._connect,
            lambda: self._alive,
            lambda: self._dead,
            self._suspect,
            self.placer.new_address,
            lambda: self._absent,
            self.look_at_load,
        )

    def _make_supervisor(
        self, line: GuestEnd | None, open_channel: Callable[[], Channel] | None
    ) -> Supervisor:
        if line is not None:
            return GuestSupervisor(self._config, self, line)
        return OwnSupervisor(
            self._config,
            self,
            CrashFiles(self._config, lambda: self._outputs.deliveries),
            self.placer,
            open_channel or (lambda: FrontendChannel(self.placer.new_address())),
        )

    def __repr__(self) -> str:
        return (
            f"ReplicaSet({len(self._alive)} of {self._size} live, "
            f"{len(self._dispatcher or ())} choices in flight)"
        )

    def _make_client(self, replica: int, channel: Channel, client: int) -> EngineClient:
        return EngineClient(
            channel,
            lambda outputs, more: self._on_outputs(replica, outputs, more),
            lambda death: self.died(replica, death),
            client,
            lambda ready: self._on_ready(replica, ready),
            lambda change: self._supervisor.workers_changed(replica, change),
        )

    # Starting and ending.

    def start_cores(self) -> None:
        """Start all cores' processes and return at once. Raises EngineStartError."""
        self.placer.begin()
        for replica, client in self._clients.items():
            client.start_core(self.placer, self._config, replica)

    def wait_ready(self) -> None:
        """Wait until all replicas serve.

        Raises EngineStartError with the cause if one cannot. A frontend that joins does without the
        replicas that have died meanwhile.
        """
        failed, until = list[EngineStartError](), math.inf
        while (waiting := self._clients.keys() - self._ready.keys() - self._dead.keys()) and (
            time.monotonic() < until
        ):
            for replica in sorted(waiting):
                try:
                    ready = self._clients[replica].poll_ready(_POLL_S / len(waiting))
                except EngineStartError as error:
                    failed.append(EngineStartError(self.named(replica, str(error))))
                    if not self._joins:
                        raise failed[0] from None
                    self._not_there(replica, str(error))
                    continue
                if ready is not None:
                    self._ready[replica] = ready
                    until = time.monotonic() + _OTHERS_S if self._joins else math.inf
            self._supervisor.take_news()
        for replica in waiting:
            self._not_there(replica, "has not answered when this frontend joined")
        if not self._ready:
            raise failed[0] if failed else EngineStartError(str(self._all_dead()))
        self._alive = sorted(self._ready)
        num_blocks = {replica: ready.num_kv_blocks for replica, ready in self._ready.items()}
        block_size = next(iter(self._ready.values())).block_size
        self._dispatcher = Dispatcher(
            make_router(self._config, num_blocks, block_size),
            self._clients,
            self._outputs,
            self.counts,
            num_blocks,
            self._branch.own_passed,
        )
        self._branch.begin(self._dispatcher)
        self._supervisor.serves(self._alive)

    def _not_there(self, replica: int, cause: str) -> None:
        """Note that a replica does not serve this frontend, which has just joined."""
        may_return = self._supervisor.restart(replica, Death(cause), None) is None
        if may_return and replica not in self._restarting:
            self._restarting[replica] = cause
        else:
            self._restarting.pop(replica, None)
            self._dead[replica] = cause

    def close(self) -> None:
        """End the engine; may be called twice."""
        self._closed = True
        self._watch.stop()
        if self._keeper is not None:
            self._keeper.stop()
        self._supervisor.close()
        self._guests.close()
        for client in self._retired:
            client.close()
        for client in self._clients.values():
            client.close()
        self.placer.close()

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The cause of the engine's death, if no replica lives or is being started again."""
        for replica in self._living:
            if (error := self._clients[replica].dead_error) is not None:
                self.died(replica, Death(str(error)))
        return self._error

    @property
    def _living(self) -> list[int]:
        """The replicas that serve, and those whose new core is starting."""
        return [*self._alive, *(r for r in self._restarting if r in self._clients)]

    async def wait_dead(self) -> EngineDeadError:
        """Return the cause when the engine has died; never return after a close."""
        if not self._closed and self.dead_error is None:
            self.attach()
        while (error := self.dead_error) is None:
            await self._change()
        return error

    async def wait_serving(self) -> None:
        """Return when a replica serves. Raises EngineDeadError if none does any more."""
        self.attach()
        while not self._alive:
            await self._change()
            self.attach()

    async def _change(self) -> None:
        """Wait until a replica serves again, or the engine has died."""
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        try:
            await watcher
        finally:
            self._watchers.discard(watcher)

    def fail_calls(self, error: EngineDeadError) -> None:
        """Give everyone who waits for an answer an exception like this one; the engine ends."""
        super().fail_calls(error)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    # Other frontends.

    async def invite(self) -> Invitation:
        """Return an invitation for a program that will listen for the cores.

        Raises EngineDeadError.
        """
        addresses = {replica: self.placer.new_address() for replica in self._alive}
        seats: tuple[Seat, ...] = ()
        try:
            seats = await self.seats(addresses)
        finally:
            taken = {seat.replica for seat in seats}
            for replica in addresses.keys() - taken:
                remove_address(addresses[replica])
        line, absent = self._guests.invite(seats), tuple(sorted(self._absent))
        return Invitation(seats, self._config, line, self._dead, absent)

    # Requests.

    def attach(self) -> None:
        """Bind the engine to the running event loop, at its first use there.

        Raises EngineDeadError, and SidestepError in a forked child.
        """
        self.home.check()
        if self._error is not None:
            raise EngineDeadError(
                *self._error.args
            )  # a new exception: each one collects the frames of its raisers
        if self._closed:
            raise EngineDeadError("the engine has been shut down")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        before, self._loop = self._loop, loop
        try:
            for replica in self._living:
                self.attach_client(replica)
        except SidestepError:
            self._loop = before
            raise
        if self._error is not None:
            raise EngineDeadError(*self._error.args)
        self._watch.stop()
        self._supervisor.attach(loop)
        self._guests.attach(loop)
        self.look_at_load()

    def attach_client(self, replica: int) -> None:
        """Bind the client of a replica to the event loop, if that runs."""
        if self._loop is None or not self._loop.is_running():
            return  # `attach` comes later
        try:
            self._clients[replica].attach()
        except EngineDeadError as error:
            self.died(replica, Death(str(error)))

    def add(self, message: AddRequest) -> None:
        """Send a request to the replica that the router chooses.

        It waits while no replica serves. Nothing happens once all replicas are dead or the set is
        closed.
        """
        if self._closed or self._error is not None:
            return
        self._requests.add(message)
        if self._loop is not None:
            self._watch.wake(self._loop)
            self.look_at_load()

    def abort(self, handles: Iterable[int]) -> None:
        """End requests on the replicas where they run; unknown handles have ended already."""
        if self._dispatcher is not None:
            self._dispatcher.abort(handles)

    # Messages from the replicas.

    def _on_outputs(self, replica: int, outputs: Outputs, more: bool) -> None:
        if replica not in self._alive:
            return  # its requests have continued from the tokens that came before its death
        if outputs.handles or outputs.pooled:
            self._watch.told_tokens(replica)
        self._requests.take(outputs)
        self._outputs.handle(outputs, more)
        self._requests.look()

    def _on_ready(self, replica: int, ready: Ready) -> None:
        """Use a replica that serves again; its cache is empty."""
        if replica not in self._restarting or self._closed:
            return
        self._ready[replica] = ready
        if (problem := self._supervisor.is_outdated(replica)) is not None:
            self.died(replica, Death(problem, "start"))
            return
        del self._restarting[replica]
        self._alive = sorted((*self._alive, replica))
        logger.warning(self.named(replica, "the engine serves again"))
        self._tell_watchers()
        self._requests.serves(replica, ready.num_kv_blocks)
        if self._loop is not None:
            self._watch.wake(self._loop)
        self._guests.back(replica)
        self._supervisor.serves([replica])

    def replace_client(self, replica: int, channel: Channel, client: int) -> EngineClient:
        """Give a replica that comes back a client for its new core, and retire the old one."""
        if (old := self._clients.get(replica)) is not None:
            old.retire()
            self._retired = [each for each in self._retired if not each.has_ended]
            self._retired.append(old)
        new = self._clients[replica] = self._make_client(replica, channel, client)
        return new

    def died(self, replica: int, death: Death) -> None:
        """Move the requests of a replica that has died, and have it started again if it may be.

        Nothing happens if its death is known, unless its new core has died too.
        """
        if self._closed or replica in self._dead or replica in self._absent:
            return
        self._leaving.discard(replica)
        is_known = replica in self._restarting and self._joins
        if is_known and not death.is_final:
            return
        if replica in self._alive:
            self._alive.remove(replica)
            self._watch.forget(replica)
            self._requests.lose(replica)
        self._restarting[replica] = death.cause
        cause = self._supervisor.restart(replica, death, self._ready.get(replica))
        if cause is not None:
            self.lost(replica, cause, death)
            return
        self.counts.restarts[death.origin] += not self._joins
        logger.error("%s; it is being started again", self.named(replica, death.cause))
        self._guests.down(replica, death.cause, of_host=death.origin == "host")
        self._move_all(replica, death, returns=True)

    def lost(self, replica: int, cause: str, death: Death | None = None) -> None:
        """Do without a replica that stays dead."""
        if self._closed or replica in self._dead:
            return
        if death is None and replica in self._alive:
            self.died(replica, Death(cause, is_final=True))
            return
        self._restarting.pop(replica, None)
        self._dead[replica] = cause
        if self._dispatcher is None:
            return  # this frontend is joining
        self._guests.lost(replica, cause)
        if not self._alive and not self._restarting:
            self._die()
            return
        logger.error("%s; its requests go on elsewhere", self.named(replica, cause))
        self._move_all(replica, death or Death(cause), returns=False)

    def owner_has_ended(self) -> None:
        """Do without the replicas that would have been started again."""
        for replica, cause in list(self._restarting.items()):
            self.lost(replica, cause)
        if self._dispatcher is not None:
            self._dispatcher.release()

    def _move_all(self, replica: int, death: Death, *, returns: bool) -> None:
        if self._dispatcher is not None:
            holds = self._supervisor.has_judge(death)
            of_host = death.origin == "host"
            self._dispatcher.move(replica, holds=holds, has_told=death.is_told, adds=not of_host)
            cause = self.named(replica, death.cause)
            self._supervisor.moved(replica, cause, returns=returns, of_host=of_host)

    def may_hear_of(self, replica: int) -> bool:
        """Return whether messages of a replica may still come."""
        return replica in self._alive

    def take_decision(self, decision: Claimed | Turn | Parked | Blamed) -> None:
        """Carry out a decision about suspects, here and at the guests."""
        self._branch.take(decision)

    def _on_stall(self, replica: int, reason: str | None) -> None:
        """Let the router skip a replica while it makes no progress."""
        router = self._requests.router
        if reason is None:
            logger.warning(self.named(replica, "the engine goes on"))
            router.resume(replica)
        else:
            logger.error(self.named(replica, reason))
            router.suspend(replica)
            if reason == SILENT:
                self._supervisor.silent(replica)

    def _die(self) -> None:
        self._error = self._all_dead()
        self._tell_watchers()
        self._requests.clear()
        self._outputs.fail_all(self._error)

    def _all_dead(self) -> EngineDeadError:
        return EngineDeadError("; ".join(self.named(r, self._dead[r]) for r in sorted(self._dead)))
