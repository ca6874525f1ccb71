"""Questions to the cores of an engine's replicas, and the collection of their answers."""

from __future__ import annotations

import abc
import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from sidestep.frontend.placement.placer import PlacedCore, Placer
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.stall_watch import StallWatch
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStalledError,
    ValidationError,
    WorkerCallError,
)
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.processes.core_args import Seat
from sidestep.ipc.transport.black_box import Recorded
from sidestep.ipc.transport.messages import Answer
from sidestep.ipc.transport.worker_calls import AnyCall, CallResult

_T = TypeVar("_T")

_SPARE_S = 0.3
"""Seconds that the other replicas have for an answer after the first good answer."""


class CoreQuestions(abc.ABC):
    """The part of ReplicaSet that asks the cores."""

    _clients: dict[int, EngineClient]
    _alive: list[int]
    _dead: dict[int, str]
    _restarting: dict[int, str]
    _absent: set[int]
    """Numbers of the replicas that the load does not need now."""
    _size: int
    _watch: StallWatch
    _asked: Counter[int]
    """By replica: questions of which the answers are awaited without a limit of time."""
    _closed: bool
    placer: Placer

    @abc.abstractmethod
    def attach(self) -> None:
        """Bind the engine to the running event loop; see ReplicaSet."""

    @abc.abstractmethod
    async def wait_serving(self) -> None:
        """Return when a replica serves; see ReplicaSet."""

    @property
    def alive(self) -> Sequence[int]:
        """Numbers of the live replicas."""
        return self._alive.copy()

    def patience_s(self, replica: int) -> float:
        """Return the seconds without progress after which a replica counts as stalled."""
        return self._watch.patience_s(replica)

    def fail_calls(self, error: EngineDeadError) -> None:
        """Give everyone who waits for an answer an exception like this one."""
        for client in self._clients.values():
            client.fail_calls(error)

    def named(self, replica: int, text: str) -> str:
        """Return the text, after the replica's number if there are several replicas."""
        return text if self._size == 1 else f"replica {replica}: {text}"

    def starting(self, replica: int, cause: str) -> str:
        """Return what to say of a replica that is being started again."""
        return self.named(replica, f"the engine is being started again: {cause}")

    async def ask(self, replica: int, method: str, *, since: int = 0, timeout_s: float) -> Answer:
        """Ask the busy loop of one replica.

        Raises ValidationError if there is no such replica, EngineDeadError, and EngineStalledError
        if it does not answer in time.
        """
        self.attach()
        if not 0 <= replica < self._size:
            raise ValidationError("replica", f"must be from 0 to {self._size - 1}, not {replica}")
        if replica in self._absent:
            raise ValidationError("replica", f"{replica} has left, or has not been needed yet")
        if (cause := self._restarting.get(replica)) is not None:
            raise EngineStalledError(self.starting(replica, cause))
        if replica not in self._dead:
            try:
                return await self._clients[replica].ask(method, since=since, timeout_s=timeout_s)
            except TimeoutError:
                raise EngineStalledError(
                    self.named(replica, f"the engine core has not answered for {timeout_s:g} s")
                ) from None
            except EngineDeadError:
                if replica not in self._dead:  # it has been shut down, or is being started again
                    raise
        raise EngineDeadError(self.named(replica, self._dead[replica]))

    async def ask_all(self, method: str) -> dict[int, Answer]:
        """Ask the busy loops of all live replicas, and return their answers by replica.

        The call waits until a replica serves. A replica that dies meanwhile is left out. Raises
        EngineDeadError if all have died.
        """
        await self.wait_serving()
        asked = self._alive.copy()
        answers = await asyncio.gather(
            *(self._answer(replica, lambda core: core.ask(method)) for replica in asked),
            return_exceptions=True,
        )
        found: dict[int, Answer] = {}
        died: EngineDeadError | None = None
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, Answer):
                found[replica] = answer
            elif isinstance(answer, EngineDeadError):
                died = answer
            else:
                raise answer
        if not found and died is not None:
            raise died
        return found

    async def call_workers(
        self, call: AnyCall, *, wait_s: float = 60.0
    ) -> dict[int, list[CallResult]]:
        """Call the workers of all live replicas, and return what each rank answers, by replica.

        The call waits until a replica serves. A replica that dies meanwhile is left out. wait_s:
        seconds for which a call that awaits the end of all requests waits for it. Raises
        EngineDeadError if all have died; WorkerCallError, which names the replicas, when all have
        answered.
        """
        await self.wait_serving()
        asked = self._alive.copy()
        answers = await asyncio.gather(
            *(
                self._answer(replica, lambda core: core.call_workers(call, wait_s))
                for replica in asked
            ),
            return_exceptions=True,
        )
        found: dict[int, list[CallResult]] = {}
        problems: list[str] = []
        for replica, answer in zip(asked, answers, strict=True):
            if isinstance(answer, list):
                found[replica] = answer
            elif isinstance(answer, WorkerCallError):
                problems.append(self.named(replica, str(answer)))
            elif not isinstance(answer, EngineDeadError):
                raise answer
        if problems:
            raise WorkerCallError("; ".join(problems))
        if not found:
            self.attach()  # raises with the cause of their death
            raise EngineDeadError("all replicas have died")
        return found

    def tell_workers(self, call: AnyCall) -> None:
        """Call the workers of all live replicas, without waiting for their answers."""
        for replica in self._alive:
            self._clients[replica].tell_workers(call)

    async def ask_responsive(
        self,
        method: str,
        *,
        limit: int | None = None,
        timeout_s: float,
        is_good: Callable[[int, Answer], bool] = lambda replica, answer: True,
    ) -> dict[int, Answer]:
        """Ask the busy loops of all live replicas, and return the answers that came in time.

        The answers are by replica; none while no replica serves. After the first good answer the
        others have `_SPARE_S` seconds, so one replica that hangs delays no call for longer. Raises
        EngineDeadError if all have died.
        """
        self.attach()
        loop = asyncio.get_running_loop()
        # Wait only briefly if all cores are known to hang. A core that works again answers at once.
        known = len(self._watch.stalled) == len(self._alive)
        until = loop.time() + (min(timeout_s, _SPARE_S) if known else timeout_s)
        tasks = {
            replica: asyncio.create_task(self._clients[replica].ask(method, limit=limit))
            for replica in self._alive
        }
        pending = set(tasks.values())
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending,
                    timeout=max(0.0, until - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                if any(
                    task in done and task.exception() is None and is_good(replica, task.result())
                    for replica, task in tasks.items()
                ):
                    until = min(until, loop.time() + _SPARE_S)
        finally:
            for task in pending:
                task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self.attach()
        return self._answered(tasks)

    def _answered(self, tasks: Mapping[int, asyncio.Task[Answer]]) -> dict[int, Answer]:
        """Return the answers by replica.

        The stall watch watches the replicas that have not answered from now on.
        """
        found: dict[int, Answer] = {}
        for replica, task in tasks.items():
            if task.cancelled():
                if replica in self._alive:
                    self._watch.suspect(replica)
            elif (error := task.exception()) is None:
                found[replica] = task.result()
            elif not isinstance(error, EngineDeadError):
                raise error
        return found

    @property
    def num_refused(self) -> int:
        """Peers without a key that have been refused at this frontend's ports."""
        return self.placer.num_refused + sum(c.num_refused for c in self._clients.values())

    def clock_offset_ns(self, replica: int) -> int:
        """Return the clock of a replica's host minus this one, in nanoseconds; 0 on this host."""
        return self._clients[replica].clock_offset_ns

    def recorded(self, replica: int) -> Recorded | None:
        """Return what the present core of a replica has noted, also after its death."""
        return None if (core := self._core_of(replica)) is None else core.recorded()

    def _core_of(self, replica: int) -> PlacedCore | None:
        return self._clients[replica].core

    def ask_idle(self, replica: int) -> asyncio.Future[Answer]:
        """Ask a replica whether it has nothing to do, and watch it: it may hang."""
        answer = self._clients[replica].ask_idle()
        self._suspect(replica)
        return answer

    def _suspect(self, replica: int) -> None:
        """Watch a replica whose core another frontend finds silent."""
        if replica in self._alive and not self._closed:
            self._watch.suspect(replica)

    async def _answer(self, replica: int, ask: Callable[[EngineClient], Awaitable[_T]]) -> _T:
        """Return a replica's answer, and watch the replica until it comes: its core may hang."""
        self._asked[replica] += 1
        self._watch.wake(asyncio.get_running_loop())
        try:
            return await ask(self._clients[replica])
        finally:
            self._asked[replica] -= 1

    @property
    def _owing(self) -> set[int]:
        """The live replicas that owe such an answer."""
        return {replica for replica in self._alive if self._asked[replica]}

    async def _connect(self, replica: int, address: ClientAddress) -> int:
        return await self._answer(replica, lambda core: core.connect(address))

    async def seats(self, addresses: Mapping[int, ClientAddress]) -> tuple[Seat, ...]:
        """Let the replicas serve another frontend too, and return its seats.

        The other frontend will listen at the addresses. Replicas that die meanwhile are left out.
        Raises EngineDeadError if all have died.
        """
        numbers = await asyncio.gather(
            *(self._connect(replica, address) for replica, address in addresses.items()),
            return_exceptions=True,
        )
        seats: list[Seat] = []
        for (replica, address), number in zip(addresses.items(), numbers, strict=True):
            if isinstance(number, int):
                seats.append(Seat(replica, number, address))
            elif not isinstance(number, EngineDeadError):
                raise number
        if not seats:
            self.attach()  # raises with the cause of their death
            raise EngineDeadError("all replicas have died")
        return tuple(seats)
