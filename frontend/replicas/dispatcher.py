"""The requests of a frontend on their way to replicas: routed, waiting, replayed after deaths."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.replicas.continuation import continued
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.replicas.sent_requests import NOWHERE, Sent, SentRequests
from sidestep.frontend.routing.router import RoutedRequest, Router
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.transport.messages import AbortRequests, AddRequest, Outputs

_MOST_DEATHS = 2
"""Number of deaths of its replicas at which a request ends."""


class Dispatcher:
    """All requests that have not ended.

    Where no replica serves, requests wait for the first that does. All methods belong to the event
    loop's thread.
    """

    def __init__(
        self,
        router: Router,
        clients: Mapping[int, EngineClient],
        outputs: OutputProcessor,
        counts: RecoveryCounts,
    ) -> None:
        """Begin without requests.

        router: chooses among the replicas that serve. clients: the present client of each replica.
        """
        self.router = router
        self._clients = clients
        self._outputs = outputs
        self._counts = counts
        self._sent = SentRequests()

    def __len__(self) -> int:
        """Return the number of choices that have not ended."""
        return len(self._sent)

    @property
    def busy(self) -> set[int]:
        """The replicas that have requests."""
        return self._sent.busy

    def add(self, message: AddRequest) -> None:
        """Take a new request."""
        num = message.sampling.n if message.beam_search is None else 1
        self._send(Sent(message, set(range(message.handle, message.handle + num))))

    def _send(self, sent: Sent) -> None:
        """Send a request to the replica that the router chooses; let it wait if there is none."""
        if not self.router.loads:
            self._sent.put(sent)
            return
        message, beams = sent.message, sent.message.beam_search
        sent.replica = self.router.choose(
            RoutedRequest(
                message.handle,
                message.prompt_token_ids + message.output_token_ids,
                message.sampling.n if beams is None else beams.beam_width,
                message.cache_salt,
                message.num_public_tokens,
            )
        )
        self._sent.put(sent)
        client = self._clients[sent.replica]
        if message.client != client.client:
            message = msgspec.structs.replace(message, client=client.client)
        client.send(message)

    def abort(self, handles: Iterable[int]) -> None:
        """End choices on the replicas where they run; unknown handles have ended already."""
        at: dict[int, list[int]] = {}
        for handle in handles:
            if (sent := self._sent.get(handle)) is not None:
                at.setdefault(sent.replica, []).append(handle)
                self._ended(handle)
        at.pop(NOWHERE, None)
        for replica, ended in at.items():
            client = self._clients[replica]
            client.send(AbortRequests(client=client.client, handles=ended))

    def _ended(self, handle: int) -> None:
        sent = self._sent.end(handle)
        if sent is not None and not sent.live and sent.replica != NOWHERE:
            self.router.finished(sent.message.handle)

    def take(self, outputs: Outputs) -> None:
        """Note which requests have begun and which have ended."""
        for started in outputs.started:
            if (sent := self._sent.get(started.handle)) is not None:
                sent.has_run = True
        for finished in outputs.finished:
            self._ended(finished.handle)

    def move(self, replica: int, error: EngineDeadError) -> None:
        """Let other replicas continue the requests of one that the router has lost.

        A request that may be the cause of the deaths ends with the error.
        """
        for sent in self._sent.take(replica):
            sent.num_deaths += sent.has_run
            if sent.num_deaths >= _MOST_DEATHS:
                self._outputs.fail(
                    self._tokens(sent),
                    EngineDeadError(f"{error}; it is the second that has died with this request"),
                )
                continue
            self._counts.replayed += 1
            sent.replica, sent.has_run, sent.since = NOWHERE, False, time.monotonic()
            self._sent.put(sent)
        if self.router.loads:
            self.go_on()

    def go_on(self) -> None:
        """Send the requests that wait, each with the tokens that have come for it so far."""
        now = time.monotonic()
        for sent in self._sent.take(NOWHERE):
            self._counts.pause_s += now - sent.since
            for message, live in continued(sent.message, self._tokens(sent)):
                self._send(Sent(message, live, num_deaths=sent.num_deaths))

    def _tokens(self, sent: Sent) -> dict[int, list[int]]:
        """Return the tokens so far of each choice of a request that has not ended, by handle."""
        found = {handle: self._outputs.tokens_of(handle) for handle in sorted(sent.live)}
        return {handle: tokens for handle, tokens in found.items() if tokens is not None}

    def clear(self) -> None:
        """Forget all requests."""
        self._sent.clear()
