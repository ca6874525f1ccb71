"""The frontend's connection to one engine core: it starts the core and notices the core's death.

An engine has one client for each replica; see replica_set.py. A core that is started again gets a
new client, so nothing of the old one can be taken for the new one's. One callback of the event loop
handles the messages from the core, and reads all that have arrived. The loop is the one that first
uses the engine: the engine itself can be started outside any loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from sidestep.frontend.placement.placer import PlacedCore, Placer
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStartError,
    SidestepError,
    WorkerCallError,
)
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.addresses import ClientAddress
from sidestep.ipc.processes.core_args import OWNER, CoreArgs, StartAgain
from sidestep.ipc.processes.forking import KeptLoop
from sidestep.ipc.transport.channels import Broken
from sidestep.ipc.transport.clocks import ClockOffset
from sidestep.ipc.transport.messages import (
    AddRequest,
    Answer,
    Call,
    CallWorkers,
    CancelCall,
    Connect,
    Dead,
    Outputs,
    Ready,
    ToCore,
    ToFrontend,
    WorkersChanged,
)
from sidestep.ipc.transport.worker_calls import AnyCall, CallResult

logger = logging.getLogger(__name__)

_TOGETHER = 16
"""Requests that wait for one another at most: preparing each takes some 0.1 ms, while a core at
rest waits."""
_JOIN_S = 60.0
"""Seconds that a core may take to answer a frontend that joins."""


Origin = Literal["core", "worker", "stall", "message", "start", "host"]
"""Where a death began: in a process, with one that hung, with a message, before the core served, or
with the end of a whole host.
"""


class Death(NamedTuple):
    """The death of a core."""

    cause: str
    origin: Origin = "core"
    is_final: bool = False
    """Whether starting it again would be useless."""
    is_told: bool = False
    """Whether the core itself has told it, after all that had begun."""


class Channel(Protocol):
    """The interface of a channel to the core.

    See ipc.transport.channels.FrontendChannel.
    """

    address: ClientAddress

    @property
    def num_refused(self) -> int:
        """Strangers that have been refused at its ports."""

    def wait_message(self, timeout_s: float) -> ToFrontend | Broken | None:
        """Return the next message, or None after `timeout_s` seconds without one."""

    def seal(self) -> None:
        """Remove the socket files, once the core has connected."""

    def send(self, *messages: ToCore) -> None:
        """Queue messages to the core, which arrive together."""

    def fileno(self) -> int:
        """Return the descriptor that signals messages from the core."""

    def receive(self) -> Sequence[ToFrontend | Broken]:
        """Return all messages that have arrived."""

    def gone_fileno(self) -> int:
        """Return the descriptor that signals the end of the core's connection."""

    def core_is_gone(self) -> bool:
        """Return whether the core's process has left since the last call."""

    def close(self) -> None:
        """Close the channel."""


class EngineClient:
    """The client of one engine core.

    All methods but `start_core` belong to the event loop's thread.
    """

    def __init__(
        self,
        channel: Channel,
        on_outputs: Callable[[Outputs, bool], None],
        on_death: Callable[[Death], None],
        client: int = OWNER,
        on_ready: Callable[[Ready], None] | None = None,
        on_workers: Callable[[WorkersChanged], None] | None = None,
    ) -> None:
        """Use a channel, without a core yet.

        on_outputs: takes a step's tokens, and whether another step's tokens follow at once. client:
        this frontend's number at the core. on_ready: called when the core serves, unless
        `poll_ready` has said it. on_workers: called when a call has changed the workers.
        """
        self.client = client
        self._dead_error: EngineDeadError | None = None
        self._channel = channel
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._on_ready = on_ready
        self._on_workers = on_workers
        self._has_served = False
        self._core: PlacedCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._call_ids = itertools.count()
        self._asked_ns: dict[int, int] = {}
        """By number of a call that waits for an answer: when it was sent."""
        self._clock = ClockOffset()
        self._outbox: list[ToCore] = []
        """Requests of this turn of the event loop."""
        self._closed = False
        self._joined_by: float | None = None
        self._kept_loop: KeptLoop | None = None

    # Starting and ending.

    def start_core(
        self,
        placer: Placer,
        config: EngineConfig,
        replica: int = 0,
        again: StartAgain | None = None,
    ) -> None:
        """Start the core and return at once.

        again: what it needs to take the place of a core that has died. Raises OSError.
        """
        args = CoreArgs(
            config=config, clients=(self._channel.address.for_core,), replica=replica, again=again
        )
        self._core = placer.place(args)

    @property
    def num_refused(self) -> int:
        """Peers without a key that have been refused at the channel's ports."""
        return self._channel.num_refused

    @property
    def core(self) -> PlacedCore | None:
        """The core that this frontend has started; None for another frontend's."""
        return self._core

    def poll_ready(self, timeout_s: float) -> Ready | None:
        """Wait at most `timeout_s` seconds for the core to serve; None if it does not serve yet.

        Raises EngineStartError with the cause if the core cannot serve.
        """
        if self._joined_by is None:
            self._joined_by = time.monotonic() + _JOIN_S
        message = self._channel.wait_message(timeout_s)
        if isinstance(message, Ready):
            self._has_served = True
            self._channel.seal()
            return message
        if isinstance(message, Dead | Broken):
            raise EngineStartError(message.cause)
        # A core that is killed sends no cause; its messages before that have been read above.
        if message is None and self._core is not None and self._core.wait(0):
            raise EngineStartError(f"{self._core.death_cause()} while it started")
        if message is None and self._core is None and time.monotonic() > self._joined_by:
            raise EngineStartError("the engine that sent the invitation does not answer")
        return None

    def close(self) -> None:
        """End the core; may be called twice."""
        if self._core is not None and not (self._closed and self._core.wait(0)):
            self._core.stop()
        self._leave()

    def retire(self) -> None:
        """Close the connection to a core that has died, and let what is left of it end.

        Does not wait for that; `close` does.
        """
        if self._core is not None:
            self._core.let_go()
            threading.Thread(target=self._core.stop, name="end a core", daemon=True).start()
        self._leave()

    def kill(self, ready: Ready, cause: str) -> None:
        """Kill a core that hangs, after its workers: it cannot end them. Only its owner can."""
        if self._core is None:
            return
        self._core.kill(ready.worker_pids)
        self._on_readable()  # it may have said something before it hung
        self._die(cause, "stall")

    def _leave(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._channel.fileno())
            self._loop.remove_reader(self._channel.gone_fileno())
        self._channel.close()

    @property
    def has_ended(self) -> bool:
        """Whether no process of a client that is retired is left to this process."""
        return self._core is None or self._core.wait(0)

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The cause of the core's death, if it has died."""
        unwatched = (
            self._loop is None and not self._closed
        )  # no loop yet that a death would be reported to
        if self._dead_error is None and unwatched and self._core is not None and self._core.wait(0):
            self._dead_error = EngineDeadError(self._core.death_cause())
        return self._dead_error

    # Talking.

    def attach(self) -> None:
        """Bind the engine to the running event loop, at its first use there.

        Raises EngineDeadError.
        """
        if (error := self.dead_error) is not None:
            raise EngineDeadError(
                *error.args
            )  # a new exception: each one collects the frames of its raisers
        if self._closed:
            raise EngineDeadError("the engine has been shut down")
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise SidestepError("this engine is used in another event loop already")
            self._calls.clear()
        self._loop = loop
        self._kept_loop = KeptLoop(loop)
        loop.add_reader(self._channel.fileno(), self._on_readable)
        if self._core is not None:
            self._core.on_death(lambda cause: self._tell_loop(loop, cause))
        loop.add_reader(self._channel.gone_fileno(), self._on_gone)
        loop.call_soon(self._on_gone)
        # The descriptor signals only changes: messages that came earlier must be read now.
        loop.call_soon(self._on_readable)

    def send(self, message: ToCore) -> None:
        """Queue a message, without waiting.

        Up to _TOGETHER requests of one turn of the event loop arrive together, so that the core's
        next step has all of them: else that of a core at rest would have the first one alone.
        Nothing happens once the engine is dead or closed.
        """
        self._outbox.append(message)
        waits = isinstance(message, AddRequest) and len(self._outbox) < _TOGETHER
        if not waits or self._loop is None:
            self._send_all()
        elif len(self._outbox) == 1:
            self._loop.call_soon(self._send_all)

    def _send_all(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages and self._dead_error is None and not self._closed:
            self._channel.send(*messages)

    async def ask(
        self,
        method: str,
        *,
        since: int = 0,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Ask the core's busy loop; raises EngineDeadError or TimeoutError."""
        return await self._ask(
            lambda call_id: Call(
                client=self.client, call_id=call_id, method=method, since=since, limit=limit
            ),
            timeout_s,
        )

    async def call_workers(self, call: AnyCall, wait_s: float) -> list[CallResult]:
        """Return what each rank answers; an empty list if the workers had nothing to do.

        wait_s: seconds for which a call that awaits the end of all requests waits for it. A caller
        that is cancelled takes back a call that has not been sent to the workers. Raises
        WorkerCallError, EngineDeadError.
        """
        self.attach()
        call_id = next(self._call_ids)
        message = CallWorkers(client=self.client, call_id=call_id, call=call, wait_s=wait_s)
        try:
            answer = await self._expect(message)
        except asyncio.CancelledError:
            self.send(CancelCall(client=self.client, call_id=call_id))
            raise
        if answer.error is not None:
            raise WorkerCallError(answer.error)
        return answer.results

    def tell_workers(self, call: AnyCall) -> None:
        """Send a call to the workers, without waiting for an answer."""
        self.send(CallWorkers(client=self.client, call_id=next(self._call_ids), call=call))

    async def connect(self, address: ClientAddress) -> int:
        """Let the core serve another frontend, which will listen at `address`.

        Return the frontend's number at the core.
        """
        answer = await self._ask(
            lambda call_id: Connect(
                client=self.client,
                call_id=call_id,
                to_core=address.to_core,
                from_core=address.from_core,
                server_key=address.server_key,
            ),
            None,
        )
        assert answer.result is not None
        return int(answer.result["client"])

    def ping(self) -> asyncio.Future[Answer]:
        """Ask the busy loop for an answer, without waiting.

        Cancel the future to forget the question.
        """
        return self._call(lambda call_id: Call(client=self.client, call_id=call_id, method="ping"))

    def ask_idle(self) -> asyncio.Future[Answer]:
        """Ask whether the core has no request and no step, without waiting.

        The answer comes behind all tokens of the requests that were aborted before.
        """
        return self._call(lambda call_id: Call(client=self.client, call_id=call_id, method="idle"))

    def _call(self, make: Callable[[int], Call | Connect]) -> asyncio.Future[Answer]:
        return self._expect(make(next(self._call_ids)))

    def _expect(self, message: Call | Connect | CallWorkers) -> asyncio.Future[Answer]:
        """Send a message, and return the future of its answer."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        self._asked_ns[message.call_id] = time.monotonic_ns()
        future.add_done_callback(lambda _: self._forget_call(message.call_id))
        self.send(message)
        return future

    def _forget_call(self, call_id: int) -> None:
        self._calls.pop(call_id, None)
        self._asked_ns.pop(call_id, None)

    @property
    def clock_offset_ns(self) -> int:
        """The clock of the core's host minus this one; 0 on this host."""
        return self._clock.ns

    async def _ask(self, make: Callable[[int], Call | Connect], timeout_s: float | None) -> Answer:
        self.attach()
        async with asyncio.timeout(timeout_s):
            answer = await self._call(make)
        if answer.error is not None:
            raise SidestepError(answer.error)
        return answer

    def fail_calls(self, error: EngineDeadError) -> None:
        """Give everyone who waits for an answer an exception like this one."""
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(EngineDeadError(*error.args))

    # Messages from the core.

    def _on_readable(self) -> None:
        if self._closed:
            return
        messages = self._channel.receive()
        num_steps = sum(isinstance(message, Outputs) for message in messages)
        for message in messages:
            if self._dead_error is not None:
                return
            if isinstance(message, Outputs):
                num_steps -= 1
                self._take_outputs(message, num_steps > 0)
            elif isinstance(message, Answer):
                self._take_answer(message)
            elif isinstance(message, Ready):
                self._serves(message)
            elif isinstance(message, WorkersChanged):
                if self._on_workers is not None:
                    self._on_workers(message)
            elif isinstance(message, Dead):
                self._die(message.cause, message.origin, message.is_final, is_told=True)
            elif isinstance(message, Broken):
                self._break_off(message.cause)

    def _take_answer(self, answer: Answer) -> None:
        future, sent_ns = self._calls.get(answer.call_id), self._asked_ns.get(answer.call_id)
        if sent_ns is not None and answer.now_ns is not None:
            self._clock.answered(sent_ns, answer.now_ns, time.monotonic_ns())
        if future is not None and not future.done():
            future.set_result(answer)

    def _serves(self, ready: Ready) -> None:
        self._has_served = True
        self._channel.seal()
        if self._on_ready is not None:
            self._on_ready(ready)

    def _take_outputs(self, outputs: Outputs, more: bool) -> None:
        try:
            self._on_outputs(outputs, more)
        except Exception as error:
            logger.exception("the outputs of a step could not be taken")
            self._break_off(f"a message of the engine core could not be used: {error!r}")

    def _break_off(self, cause: str) -> None:
        """Give up a core that lives: tokens of it are lost, and nobody knows whose.

        The process that started the core ends it. At any other's core this frontend's requests end
        when the connection does.
        """
        self._die(cause, "message")
        if self._core is not None:
            self._core.let_go()  # `close`, which waits for its end, comes later
        else:
            self.close()

    def _on_gone(self) -> None:
        if self._closed or not self._channel.core_is_gone():
            return
        if self._core is not None:
            self._core.link_ended()  # its placer knows more, and reports it
        else:
            self._core_ended("the engine core has ended")

    def _tell_loop(self, loop: asyncio.AbstractEventLoop, cause: str) -> None:
        """Report the core's end to the loop, from the thread that watches the core."""
        try:
            loop.call_soon_threadsafe(self._core_ended, cause)
        except RuntimeError:
            pass  # the loop is closed: no task waits there

    def _core_ended(self, cause: str) -> None:
        self._on_readable()  # its last messages have more details than its exit status
        is_of_host = self._core is not None and self._core.end_is_of_host
        self._die(cause, "host" if is_of_host else "core")

    def _die(
        self, cause: str, origin: Origin, is_final: bool = False, is_told: bool = False
    ) -> None:
        if self._dead_error is not None or self._closed:
            return
        self._dead_error = EngineDeadError(cause)
        self.fail_calls(self._dead_error)
        origin = origin if self._has_served or origin == "host" else "start"
        self._on_death(Death(cause, origin, is_final, is_told))
