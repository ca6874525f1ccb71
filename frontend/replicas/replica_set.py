"""The replicas of one engine as one: requests are routed to them and outlive a replica's death.

Each replica is an engine core with its workers. Handles are this frontend's and unique over all
replicas, so the receiver of outputs need not know which replica sent them.

When a replica dies, its last messages are read first. Then each of its requests goes to another
replica, with the tokens that it has produced. It enters there as a preempted request enters again,
so its reader sees a pause and the same tokens. After that, every message of the dead replica is
ignored. A request that was running on `_MOST_DEATHS` replicas when they died ends with the error
instead. It may be the cause of the deaths, and must not end all replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping

import msgspec

from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.replicas.continuation import continued
from sidestep.frontend.replicas.core_questions import CoreQuestions
from sidestep.frontend.replicas.engine_client import Channel, EngineClient
from sidestep.frontend.replicas.replica_status import ReplicaStatus
from sidestep.frontend.replicas.sent_requests import Sent, SentRequests
from sidestep.frontend.replicas.stall_watch import StallWatch
from sidestep.frontend.routing.router import RoutedRequest, Router
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import (
    EngineDeadError,
    EngineStartError,
)
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.forking import Home
from sidestep.ipc.transport.messages import (
    AbortRequests,
    AddRequest,
    Outputs,
    Ready,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds of one round of waiting for the first message of all replicas together."""
_OTHERS_S = 5.0
"""Seconds that the other replicas have for their first message to a frontend that joins.

They run already, but one of them may have died.
"""
_MOST_DEATHS = 2
"""Number of deaths of its replicas at which a request ends."""


class ReplicaSet(CoreQuestions):
    """All replicas of one engine.

    The methods belong to the event loop's thread, except those that start and end.
    """

    def __init__(
        self,
        config: EngineConfig,
        outputs: OutputProcessor,
        channels: Mapping[int, tuple[Channel, int]],
        *,
        joins: bool = False,
    ) -> None:
        """Make the clients of the replicas, without starting any.

        outputs: receives all outputs. channels: the channels to the live replicas by their numbers,
        each with this frontend's number there. joins: another frontend owns the engine.
        """
        self.home = Home()
        self._config = config
        self._outputs = outputs
        self._joins = joins
        self._size = config.parallel.data_parallel_size
        self._clients = {
            replica: self._make_client(replica, *channel) for replica, channel in channels.items()
        }
        self._ready: dict[int, Ready] = {}
        self._alive: list[int] = []
        self._dead = {
            replica: "had died before this frontend joined"
            for replica in range(self._size)
            if replica not in channels
        }
        self._error: EngineDeadError | None = None
        self._router: Router | None = None
        self._sent = SentRequests()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._watchers: set[asyncio.Future[None]] = set()
        self._watch = StallWatch(
            lambda replica: self._clients[replica].ping(), lambda: self._sent.busy, self._on_stall
        )

    def __repr__(self) -> str:
        return (
            f"ReplicaSet({len(self._alive)} of {self._size} live, "
            f"{len(self._sent)} choices in flight)"
        )

    def _make_client(self, replica: int, channel: Channel, client: int) -> EngineClient:
        return EngineClient(
            channel,
            lambda outputs, more: self._on_outputs(replica, outputs, more),
            lambda error: self._on_death(replica, str(error)),
            client,
        )

    # Starting and ending.

    def start_cores(self) -> None:
        """Start all cores' processes and return at once."""
        for replica, client in self._clients.items():
            client.start_core(self._config, replica)

    def wait_ready(self) -> None:
        """Wait until all replicas serve.

        Raises EngineStartError with the cause if one cannot. A frontend that joins does without the
        replicas that have died meanwhile.
        """
        waiting, failed, until = dict(self._clients), list[EngineStartError](), math.inf
        while waiting and time.monotonic() < until:
            for replica, client in list(waiting.items()):
                try:
                    ready = client.poll_ready(_POLL_S / len(waiting))
                except EngineStartError as error:
                    failed.append(EngineStartError(self.named(replica, str(error))))
                    if not self._joins:
                        raise failed[0] from None
                    self._dead[replica] = str(error)
                    del waiting[replica]
                    continue
                if ready is not None:
                    self._ready[replica] = ready
                    del waiting[replica]
                    until = time.monotonic() + _OTHERS_S if self._joins else math.inf
        self._dead |= dict.fromkeys(waiting, "has not answered when this frontend joined")
        if not self._ready:
            raise failed[0]
        self._alive = sorted(self._ready)
        self._router = self._make_router()

    def _make_router(self) -> Router:
        name = self._config.frontend.routing
        if len(self._alive) == 1:
            name = "round_robin"  # there is nothing to weigh
        elif name == "prefix" and not self._config.cache.enable_prefix_caching:
            name = "least_loaded"
        router: Router = registry.load(registry.ROUTERS[name])(
            {replica: ready.num_kv_blocks for replica, ready in self._ready.items()},
            next(iter(self._ready.values())).block_size,
        )
        return router

    def close(self) -> None:
        """End the engine; may be called twice."""
        self._closed = True
        self._watch.stop()
        for client in self._clients.values():
            client.close()

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The status of each replica."""
        stalled = self._watch.stalled
        return [
            ReplicaStatus(
                replica, self._ready.get(replica), self._dead.get(replica), stalled.get(replica)
            )
            for replica in range(self._size)
        ]

    @property
    def ready(self) -> list[Ready]:
        """The first message of each replica that has started."""
        return list(self._ready.values())

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output that every replica takes, in tokens."""
        return min(ready.max_model_len for ready in self._ready.values())

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The cause of the engine's death, if none of its replicas lives."""
        for replica in self._alive.copy():
            if (error := self._clients[replica].dead_error) is not None:
                self._on_death(replica, str(error))
        return self._error

    async def wait_dead(self) -> EngineDeadError:
        """Return the cause when the engine has died; never return after a close."""
        if not self._closed and self.dead_error is None:
            self.attach()
        while (error := self.dead_error) is None:
            watcher = asyncio.get_running_loop().create_future()
            self._watchers.add(watcher)
            try:
                await watcher
            finally:
                self._watchers.discard(watcher)
        return error

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
        for replica in self._alive.copy():
            try:
                self._clients[replica].attach()
            except EngineDeadError as error:
                self._on_death(replica, str(error))
        if self._error is not None:
            raise EngineDeadError(*self._error.args)
        self._watch.stop()
        self._loop = loop

    def add(self, message: AddRequest) -> None:
        """Send a request to the replica that the router chooses.

        Nothing happens once all replicas are dead or the set is closed.
        """
        num = message.sampling.n if message.beam_search is None else 1
        self._send(Sent(message, set(range(message.handle, message.handle + num))))

    def _send(self, sent: Sent) -> None:
        if not self._alive or self._closed:
            return
        assert self._router is not None, "wait_ready() comes first"
        message, beams = sent.message, sent.message.beam_search
        sent.replica = self._router.choose(
            RoutedRequest(
                message.handle,
                message.prompt_token_ids + message.output_token_ids,
                message.sampling.n if beams is None else beams.beam_width,
                message.cache_salt,
                message.num_public_tokens,
            )
        )
        self._sent.put(sent)
        if self._loop is not None:
            self._watch.wake(self._loop)
        client = self._clients[sent.replica]
        if message.client != client.client:
            message = msgspec.structs.replace(message, client=client.client)
        client.send(message)

    def abort(self, handles: Iterable[int]) -> None:
        """End requests on the replicas where they run; unknown handles have ended already."""
        at: dict[int, list[int]] = {}
        for handle in handles:
            if (sent := self._sent.get(handle)) is not None:
                at.setdefault(sent.replica, []).append(handle)
                self._ended(handle)
        for replica, ended in at.items():
            client = self._clients[replica]
            client.send(AbortRequests(client=client.client, handles=ended))

    def _ended(self, handle: int) -> None:
        sent = self._sent.end(handle)
        if sent is not None and not sent.live and self._router is not None:
            self._router.finished(sent.message.handle)

    # Messages from the replicas.

    def _on_outputs(self, replica: int, outputs: Outputs, more: bool) -> None:
        if replica in self._dead:
            return  # its requests have continued from the tokens that came before its death
        if outputs.handles or outputs.pooled:
            self._watch.told_tokens(replica)
        for started in outputs.started:
            if (sent := self._sent.get(started.handle)) is not None:
                sent.has_run = True
        for finished in outputs.finished:
            self._ended(finished.handle)
        self._outputs.handle(outputs, more)

    def _on_death(self, replica: int, cause: str) -> None:
        if replica not in self._alive:
            return
        self._alive.remove(replica)
        self._dead[replica] = cause
        self._watch.forget(replica)
        if not self._alive:
            self._die()
            return
        logger.error("%s; its requests go on elsewhere", self.named(replica, cause))
        if self._router is not None:
            self._router.dead(replica)
        for sent in self._sent.take(replica):
            self._move(sent, EngineDeadError(self.named(replica, cause)))

    def _on_stall(self, replica: int, reason: str | None) -> None:
        """Let the router skip a replica while it makes no progress."""
        assert self._router is not None
        if reason is None:
            logger.warning(self.named(replica, "the engine goes on"))
            self._router.resume(replica)
        else:
            logger.error(self.named(replica, reason))
            self._router.suspend(replica)

    def _move(self, sent: Sent, error: EngineDeadError) -> None:
        """Let another replica continue a request whose replica has died."""
        tokens = {
            h: ids for h in sorted(sent.live) if (ids := self._outputs.tokens_of(h)) is not None
        }
        num_deaths = sent.num_deaths + sent.has_run
        if num_deaths >= _MOST_DEATHS:
            self._outputs.fail(
                tokens,
                EngineDeadError(f"{error}; it is the second that has died with this request"),
            )
            return
        for message, live in continued(sent.message, tokens):
            self._send(Sent(message, live, num_deaths=num_deaths))

    def _die(self) -> None:
        if self._size == 1:
            self._error = EngineDeadError(self._dead[0])
        else:
            self._error = EngineDeadError(
                "; ".join(self.named(r, self._dead[r]) for r in sorted(self._dead))
            )
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
        self._sent.clear()
        self._outputs.fail_all(self._error)
