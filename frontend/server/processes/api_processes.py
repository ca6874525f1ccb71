"""The first process's view of a server's other processes (--api-server-count).

The first process owns the engine and the listening socket. All processes accept from that one
socket, which the others inherit. The system hands a connection to a process that waits for one. So
a process that hangs gets none, and one that dies loses only connections that it has accepted. A
process that dies after it has joined is replaced; one that cannot join ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

from sidestep.frontend.options.serve_options import Keys, ServerArgs
from sidestep.frontend.server.observe.figures import Figures
from sidestep.frontend.server.processes.api_line import Drain, Joined, Line, Serve, Word
from sidestep.frontend.server.service.service import Service
from sidestep.ipc.common.errors import EngineDeadError, EngineStartError, SidestepError
from sidestep.ipc.common.logs import tell
from sidestep.ipc.processes.core_args import Invitation
from sidestep.ipc.processes.process import Child, spawn

_ANSWER_S = 2.0
"""Seconds to wait for the figures of a process, which may hang."""
_LAST_S = 5.0
"""Seconds that the others may need beyond the time of a drain, before they are ended."""


class ApiProcessArgs(msgspec.Struct):
    """Arguments of such a process."""

    args: ServerArgs
    keys: Keys
    version: str
    names: tuple[str, ...]
    public_prefixes: list[list[int]]
    invitation: str
    listener: int
    """Descriptor of the listening socket."""
    line: int
    """Descriptor of the process's end of the private line."""


class _Member:
    """One of the other processes."""

    def __init__(self, child: Child, line: Line) -> None:
        self.child = child
        self.line = line
        self.hearing = asyncio.create_task(line.run())
        self.has_joined = asyncio.Event()
        self.ended = asyncio.Event()
        self.latest: Figures | None = None
        """Last figures of the process."""
        self.serves = False

    def serve(self) -> None:
        """Let the process take connections."""
        self.serves = True
        self.line.say(Serve())


class ApiProcesses:
    """All of the other processes."""

    def __init__(self, service: Service, keys: Keys, version: str, listener: socket.socket) -> None:
        self._service = service
        self._keys = keys
        self._version = version
        self._listener = listener
        self._members: dict[int, _Member] = {}
        self._past: Figures | None = None
        """Sum of the figures of processes that have ended."""
        self._is_serving = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: SidestepError | None = None
        """Reason why a process could not be replaced."""
        self.cut_short = False
        """Whether a process has ended, or was ended, before its requests in a drain."""
        self._is_draining = False
        self.on_failure: Callable[[], None] = lambda: None
        service.gather = self.gather

    async def start(self) -> None:
        """Start all processes, and return when all of them could serve.

        Raises EngineStartError when one ends before that.
        """
        count = self._service.args.api_server_count
        await asyncio.gather(*(self._add(number) for number in range(1, count)))

    def serve(self) -> None:
        """Let all processes take connections."""
        self._is_serving = True
        for member in self._members.values():
            member.serve()

    def drain(self) -> None:
        """Let the processes take no more requests and end after the running ones.

        They end after --drain-grace and --shutdown-timeout at the latest.
        """
        self._is_serving, self._is_draining = False, True
        for member in self._members.values():
            member.line.say(Drain())

    async def wait_ended(self) -> None:
        """Wait until all processes that served have ended.

        Return at the latest after the time in which they should have ended by themselves.
        """
        self._is_serving = False
        ends = [
            asyncio.create_task(member.ended.wait())
            for member in self._members.values()
            if member.serves
        ]
        if ends:
            _, late = await asyncio.wait(
                ends, timeout=self._service.args.shutdown_timeout + _LAST_S
            )
            for task in late:
                task.cancel()
            self.cut_short |= bool(late)

    async def close(self) -> None:
        """End the processes that still run."""
        self._is_serving = False
        for task in self._tasks:
            task.cancel()
        members = list(self._members.values())
        await asyncio.gather(*(asyncio.to_thread(member.child.stop) for member in members))
        for member in members:
            member.hearing.cancel()
        await asyncio.gather(
            *self._tasks, *(member.hearing for member in members), return_exceptions=True
        )

    async def gather(self) -> Figures:
        """Return the figures of all processes, of this one and of those that have ended.

        So no counter ever falls.
        """
        members = list(self._members.values())
        answers = await asyncio.gather(*(member.line.ask(_ANSWER_S) for member in members))
        total = self._service.own_figures()
        for member, told in zip(members, answers, strict=True):
            if told is not None:
                member.latest = told
            if member.latest is not None and not member.ended.is_set():
                total.add(member.latest)
                total.num_processes -= told is None
        if self._past is not None:
            total.add(self._past)
        return total

    async def _add(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            service = self._service
            job = ApiProcessArgs(
                service.args,
                self._keys,
                self._version,
                service.names,
                service.public_prefixes.prefixes,
                await service.llm.invite(),
                self._listener.fileno(),
                theirs.fileno(),
            )
            child = spawn(
                f"API process {number}",
                "sidestep.frontend.server.processes.api_process:main",
                job,
                pass_fds=(job.listener, job.line),
                remove=Invitation.decode(job.invitation).folders,
            )

        def on_word(word: Word) -> None:
            if isinstance(word, Joined):
                member.has_joined.set()

        member = self._members[number] = _Member(child, Line(ours, self.gather, on_word))
        loop = asyncio.get_running_loop()
        child.on_death(lambda cause: _tell(loop, lambda: self._ended(number, member, cause)))
        joined, ended = (
            asyncio.create_task(member.has_joined.wait()),
            asyncio.create_task(member.ended.wait()),
        )
        try:
            await asyncio.wait((joined, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
            ended.cancel()
        if not member.has_joined.is_set():
            raise EngineStartError(f"{child.death_cause()} while it started")
        if self._is_serving:
            member.serve()

    def _ended(self, number: int, member: _Member, cause: str) -> None:
        member.ended.set()
        self.cut_short |= self._is_draining and member.serves and member.child.exit_status != 0
        if member.latest is not None:
            member.latest.end()
            if self._past is None:
                self._past = member.latest
            else:
                self._past.add(member.latest)
        if self._is_serving and member.has_joined.is_set() and not self._service.llm.errored:
            tell(
                f"sidestep: {cause}; its requests have ended, another takes its place",
                logging.ERROR,
            )
            task = asyncio.create_task(self._replace(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _replace(self, number: int) -> None:
        try:
            await self._add(number)
        except EngineDeadError:
            pass  # the process died with the engine, whose death ends the server too
        except (SidestepError, OSError) as error:
            self.failure = SidestepError(f"an API process could not be replaced: {error}")
            self.on_failure()


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Call a function on the loop, from the thread that watches a process."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass  # the loop is closed
