"""The requests of a frontend on their way to replicas: routed, waiting, replayed after deaths.

A request that had begun on a replica that has died is a suspect. It is held until it has its turn
in probation; see probation/probation.py. All others go on at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from sidestep.frontend.output.output_processor import OutputProcessor
from sidestep.frontend.replicas.continuation import continued
from sidestep.frontend.replicas.engine_client import EngineClient
from sidestep.frontend.replicas.probation.suspects import Suspects
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.replicas.scaling.ttft_forecast import TtftForecast
from sidestep.frontend.replicas.sent_requests import HELD, NOWHERE, Sent, SentRequests
from sidestep.frontend.routing.router import RoutedRequest, Router
from sidestep.ipc.common.errors import EngineDeadError
from sidestep.ipc.transport.messages import AbortRequests, AddRequest, Answer, Outputs


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
        num_blocks: Mapping[int, int],
        on_passed: Callable[[list[int]], None],
    ) -> None:
        """Begin without requests.

        router: chooses among the replicas that serve. clients: the present client of each replica.
        num_blocks: the number of KV blocks of each replica that serves.
        on_passed: takes suspects that have given tokens again, or have ended, by the handle of
        their first choice.
        """
        self.router = router
        self._clients = clients
        self._outputs = outputs
        self._counts = counts
        self._on_passed = on_passed
        self._sent = SentRequests()
        self._suspects = Suspects()
        self._serving = dict(num_blocks)
        """The replicas that serve, each with its number of KV blocks."""
        self._place: int | None = None
        """The replica that is kept for suspects."""
        self._forecast = TtftForecast()

    def __len__(self) -> int:
        """Return the number of choices that have not ended."""
        return len(self._sent)

    @property
    def busy(self) -> set[int]:
        """The replicas that have requests."""
        return self._sent.busy

    def has(self, replica: int) -> bool:
        """Return whether a replica has requests of this frontend."""
        return replica in self._sent.busy

    @property
    def has_suspects(self) -> bool:
        """Whether requests run in probation, or wait for their turn."""
        return self._place is not None or bool(len(self._suspects))

    def forecast_s(self) -> float:
        """Return the foreseen seconds until the first token of a request that comes now."""
        now = time.monotonic()
        if self.router.loads:
            return self._forecast.seconds(self.router.candidates, now)
        return max((now - sent.since for sent in self._sent.at(NOWHERE)), default=0.0)

    def add(self, message: AddRequest) -> None:
        """Take a new request."""
        num = message.sampling.n if message.beam_search is None else 1
        handles = set(range(message.handle, message.handle + num))
        self._send(Sent(message, handles, message.handle))

    def _send(self, sent: Sent) -> None:
        """Send a request to the replica that the router chooses; let it wait if there is none."""
        if not self.router.loads:
            self._sent.put(sent)
            return
        message, beams = sent.message, sent.message.beam_search
        replica = self.router.choose(
            RoutedRequest(
                message.handle,
                message.prompt_token_ids + message.output_token_ids,
                message.sampling.n if beams is None else beams.beam_width,
                message.cache_salt,
                message.num_public_tokens,
            )
        )
        sent.is_routed = True
        work = self.router.work_of(message.handle)
        self._forecast.sent(message.handle, replica, work, time.monotonic())
        self._send_to(sent, replica)

    def _send_to(self, sent: Sent, replica: int) -> None:
        sent.replica = replica
        self._sent.put(sent)
        client, message = self._clients[replica], sent.message
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
        for replica, ended in at.items():
            if replica not in (NOWHERE, HELD):
                self._abort_at(replica, ended)
        self.look()

    def _abort_at(self, replica: int, handles: list[int]) -> None:
        client = self._clients[replica]
        client.send(AbortRequests(client=client.client, handles=handles))

    def _ended(self, handle: int) -> None:
        sent = self._sent.end(handle)
        if sent is None:
            return
        self._suspects.ended(sent.first, handle)
        if not sent.live:
            self._forecast.ended(sent.message.handle, time.monotonic())
            if sent.is_routed:
                self.router.finished(sent.message.handle)

    def take(self, outputs: Outputs) -> None:
        """Note which requests have begun and which have ended."""
        for started in outputs.started:
            if (sent := self._sent.get(started.handle)) is not None:
                sent.has_run = True
                self._forecast.begun(sent.message.handle, time.monotonic())
        for finished in outputs.finished:
            self._ended(finished.handle)

    def look(self) -> None:
        """Report the suspects that have given tokens again, or have ended."""
        if passed := self._suspects.take_passed(lambda handle: len(self._tokens_of(handle))):
            self._counts.suspects = len(self._suspects)
            self._on_passed(passed)

    # Replicas that die and serve again.

    def lose(self, replica: int) -> None:
        """Send nothing to a replica that has died."""
        self._serving.pop(replica, None)
        self._forecast.lost(replica)
        if replica in self.router.loads:
            self.router.dead(replica)
        else:
            self.router.resume(replica)  # it may have stalled while it was kept for suspects

    def move(self, replica: int, *, holds: bool, has_told: bool, adds: bool) -> None:
        """Let other replicas continue the requests of one that has died, except for suspects.

        holds: whether to hold suspects, until they have their turns. has_told: whether the replica
        has told all that had begun; else each of its requests may have. adds: whether requests
        that were no suspects become ones.
        """
        for sent in self._sent.take(replica):
            self._counts.replayed += 1
            has_run = sent.has_run or not has_told
            is_held = holds and ((has_run and adds) or sent.first in self._suspects)
            if is_held:
                where = {handle: len(self._tokens_of(handle)) for handle in sent.live}
                self._suspects.hold(sent.first, replica, where, has_run=has_run)
            sent.wait(HELD if is_held else NOWHERE)
            self._sent.put(sent)
        self._counts.suspects = len(self._suspects)
        self.go_on()

    def retire(self, replica: int) -> None:
        """Send nothing more to a replica that is to leave; what runs there goes on."""
        del self._serving[replica]
        self.router.dead(replica)
        for sent in self._sent.at(replica):
            sent.is_routed = False

    def clear_out(self, replica: int) -> None:
        """Let the requests of a replica that is to leave go on elsewhere."""
        self._leave(replica, self._sent.at(replica))

    def serves(self, replica: int, num_blocks: int) -> None:
        """Use a replica that serves again; its cache is empty."""
        self._serving[replica] = num_blocks
        if replica == self._place:
            self._run_held()
        else:
            self.router.back(replica, num_blocks)
            self.go_on()

    def go_on(self) -> None:
        """Send the requests that wait, if a replica serves them."""
        if self.router.loads:
            for sent in self._sent.take(NOWHERE):
                for each in self._continued(sent):
                    self._send(each)

    def _continued(self, sent: Sent) -> list[Sent]:
        """Return what continues a request, with the tokens that have come for it so far."""
        self._counts.pause_s += time.monotonic() - sent.since
        return [
            Sent(message, live, sent.first)
            for message, live in continued(sent.message, self._tokens(sent))
        ]

    def _tokens(self, sent: Sent) -> dict[int, list[int]]:
        """Return the tokens so far of each choice of a request that has not ended, by handle."""
        found = {handle: self._outputs.tokens_of(handle) for handle in sorted(sent.live)}
        return {handle: tokens for handle, tokens in found.items() if tokens is not None}

    def _tokens_of(self, handle: int) -> list[int]:
        return self._outputs.tokens_of(handle) or []

    # Probation.

    def claim(self, replica: int | None, *, ends_turn: bool) -> None:
        """Keep a replica for suspects, or none: no other request goes or stays there.

        ends_turn: whether suspects that have not begun to run must wait for another turn.
        """
        if ends_turn:
            self._suspects.end_turn(sent.first for sent in self._sent.at(HELD))
        before, self._place = self._place, replica
        if before == replica:
            return
        if before in self._serving:
            self.router.back(before, self._serving[before])
        if replica in self._serving:
            self.router.dead(replica)
            self._leave(replica, self._sent.at(replica))
        self.go_on()

    def take_suspects(self) -> list[tuple[int, int]]:
        """Return the suspects since the last call, each behind its replica."""
        return self._suspects.take_reports()

    def run(self, suspects: Iterable[int]) -> None:
        """Let suspects run on the replica that is kept, as soon as it serves."""
        self._suspects.run(suspects)
        if self._place in self._serving:
            self._run_held()

    def _run_held(self) -> None:
        assert self._place is not None
        for sent in self._sent.take(HELD):
            if self._suspects.may_run(sent.first):
                for each in self._continued(sent):
                    self._send_to(each, self._place)
            else:
                self._sent.put(sent)

    def park(self, suspects: Iterable[int]) -> None:
        """Let requests that have passed leave the replica that is kept."""
        if self._place in self._serving:
            firsts = set(suspects)
            leaving = [each for each in self._sent.at(self._place) if each.first in firsts]
            self._leave(self._place, leaving)

    def _leave(self, replica: int, leaving: list[Sent]) -> None:
        """Take requests from a replica; they go on when their last tokens from it have come."""
        leaving = [sent for sent in leaving if not sent.is_leaving]
        if not leaving:
            return
        for sent in leaving:
            sent.is_leaving, sent.is_routed = True, False
        self._abort_at(replica, [handle for sent in leaving for handle in sorted(sent.live)])

        def left(answer: asyncio.Future[Answer]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return  # it has died, so they have left it
            for sent in leaving:
                if sent.is_leaving and sent.replica == replica:
                    self._forecast.ended(sent.message.handle, time.monotonic())
                    sent.wait(NOWHERE)
            self.go_on()

        self._clients[replica].ask_idle().add_done_callback(left)

    def blame(self, suspect: int, cause: str) -> None:
        """End a request that has run alone at a death, with an error."""
        handles = [
            handle
            for handle in self._sent.handles_of(suspect)
            if self._outputs.tokens_of(handle) is not None
        ]
        self._counts.blamed += bool(handles)
        self._outputs.fail(handles, EngineDeadError(f"{cause}; the cause is this request: {_WHY}"))
        self.abort(handles)

    def release(self) -> None:
        """Let all suspects go on: nobody is left who gives them turns."""
        self._suspects.clear()
        self._counts.suspects = 0
        for sent in self._sent.at(HELD):
            sent.replica = NOWHERE
        self.claim(None, ends_turn=True)
        self.go_on()

    def clear(self) -> None:
        """Forget all requests."""
        self._sent.clear()
        self._suspects.clear()
        self._forecast = TtftForecast()
        self._counts.suspects = 0


_WHY = "it was the only one that ran"
"""The proof in the error of a request that is blamed for a death."""
