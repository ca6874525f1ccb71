"""The questions that an application can ask a running engine: health, statistics and records."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal

import msgspec

from sidestep.frontend.placement.placer import HostStatus
from sidestep.frontend.replicas.recovery_counts import RecoveryCounts
from sidestep.frontend.replicas.replica_set import ReplicaSet
from sidestep.frontend.replicas.replica_status import ReplicaStatus
from sidestep.frontend.vllm.vllm_names import takes_vllm_arguments
from sidestep.ipc.common.errors import EngineDeadError, EngineStalledError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.transport.clocks import moved_request, moved_step
from sidestep.ipc.transport.messages import Answer
from sidestep.ipc.transport.records import RequestRecord, StepRecord, unpack_requests, unpack_steps

Health = Literal["healthy", "restarting", "degraded", "dead"]
_ANSWER_S = 5.0
"""Seconds that a core may take to answer a question."""
_MEANS = {"kv_cache_usage", "spec_decode_draft_length"}
"""Statistics of which several replicas have a mean and no sum."""


class EngineView:
    """The part of AsyncLLM that answers questions about its replicas."""

    _config: EngineConfig
    _replicas: ReplicaSet

    async def check_health(
        self, *, timeout_s: float = 5.0, max_stall_s: float | None = None
    ) -> Health:
        """Return the health of an engine that makes progress, or that is being started again.

        One of several replicas is enough (`replicas` describes each). 'healthy': all replicas
        live. 'restarting': one is being started again, or all are; requests wait or are served by
        the others. 'degraded': one stays dead.

        Raises EngineDeadError if the engine has died; EngineStalledError if no core answers within
        `timeout_s`, or if the steps in flight of all cores that answer have made no progress for
        `max_stall_s`. By default that is the time after which a replica counts as stalled. No core
        has longer for its answer than half of `stall_limit`, at which it would be killed.
        """
        timeout_s = min(timeout_s, self._config.frontend.stall_limit / 2 or timeout_s)
        answers = await self._replicas.ask_responsive(
            "ping",
            timeout_s=timeout_s,
            is_good=lambda replica, answer: self._goes_on(replica, answer, max_stall_s),
        )
        if not self._replicas.alive or any(
            self._goes_on(replica, answer, max_stall_s) for replica, answer in answers.items()
        ):
            return self.health
        raise EngineStalledError(
            "; ".join(
                self._replicas.named(
                    replica,
                    "the steps in flight have made no progress for "
                    f"{_stalled_s(answers[replica]):.1f} s"
                    if replica in answers
                    else f"the engine core has not answered for {timeout_s:g} s",
                )
                for replica in self._replicas.alive
            )
        )

    def _goes_on(self, replica: int, ping: Answer, max_stall_s: float | None) -> bool:
        """Return whether the answer to a ping shows progress."""
        patience_s = self._replicas.patience_s(replica) if max_stall_s is None else max_stall_s
        return _stalled_s(ping) <= patience_s

    @property
    def health(self) -> Health:
        """The health of the engine as `check_health` returns it, without asking the cores."""
        replicas = self.replicas
        if self.errored:
            return "dead"
        if any(status.dead is not None for status in replicas):
            return "degraded"
        return "restarting" if any(status.restarting for status in replicas) else "healthy"

    @property
    def recovery(self) -> RecoveryCounts:
        """Counts of the deaths that this frontend has seen, and of what was done about them."""
        return self._replicas.counts

    @property
    def predicted_ttft_s(self) -> float:
        """Foreseen seconds until the first token of a request that comes now, from the queues."""
        return self._replicas.load().forecast_s

    async def wait_dead(self) -> EngineDeadError:
        """Return the cause when the engine has died; never return after a shutdown.

        An engine has died when all of its replicas have, and none is being started again.
        """
        return await self._replicas.wait_dead()

    @takes_vllm_arguments
    async def reset_prefix_cache(self) -> bool:
        """Remove all cached prefixes of all replicas; running requests continue."""
        answers = await self._replicas.ask_all("reset_prefix_cache")
        return all((answer.result or {})["done"] for answer in answers.values())

    async def get_stats(self) -> dict[str, float]:
        """Return counts of the scheduler and the KV cache, and the device's busy and idle seconds.

        The idle seconds are by cause; see engine_core/scheduling/scheduler.py and
        flight_recorder.py. With several replicas, return their sums, and the means of the KV
        cache's usage and of the drafts of a row. Raises EngineStalledError if no core answers.
        """
        return sum_stats((await self.get_stats_by_replica()).values())

    async def get_stats_by_replica(self) -> dict[int, dict[str, float]]:
        """Return the stats of each replica whose core answers, by the replica's number."""
        answers = await self._replicas.ask_responsive("stats", timeout_s=_ANSWER_S)
        if not answers and not self._replicas.alive:
            raise EngineStalledError(
                "; ".join(
                    self._replicas.starting(status.number, status.restarting)
                    for status in self.replicas
                    if status.restarting is not None
                )
            )
        if not answers:
            raise EngineStalledError(f"the engine core has not answered for {_ANSWER_S:g} s")
        return {replica: answer.result or {} for replica, answer in answers.items()}

    async def get_step_records(self, since: int = 0, *, replica: int = 0) -> list[StepRecord]:
        """Return the flight recorder's steps of one replica, oldest first.

        They are the last steps that have come back, from number `since` on. The recorder holds some
        thousand; asking stops nothing.
        """
        answer = await self._replicas.ask(replica, "step_records", since=since, timeout_s=_ANSWER_S)
        offset = self._replicas.clock_offset_ns(replica)
        steps = unpack_steps(answer.records)
        return [moved_step(step, -offset) for step in steps] if offset else steps

    async def get_request_records(self, limit: int | None = None) -> list[RequestRecord]:
        """Return the last requests that have ended, then all live ones with what each waits for.

        The ended requests are in order, the oldest first. The records come replica by replica. A
        `limit` is the most records of each kind: of requests that have ended, that run and that
        wait. The limit bounds the cost of asking.
        """
        answers = await self._replicas.ask_responsive(
            "request_records", limit=limit, timeout_s=_ANSWER_S
        )
        return [
            self._here(record, replica)
            for replica, answer in answers.items()
            for record in unpack_requests(answer.records)
        ]

    def _here(self, record: RequestRecord, replica: int) -> RequestRecord:
        """Return a record of a replica with that number, and with times of this machine's clock."""
        if offset := self._replicas.clock_offset_ns(replica):
            record = moved_request(record, -offset)
        return msgspec.structs.replace(record, replica=replica) if replica else record

    @property
    def errored(self) -> bool:
        """Whether the engine has died: no replica lives."""
        return self._replicas.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The cause of the engine's death; None while it lives."""
        return self._replicas.dead_error

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The data-parallel replicas, which of them live, and the causes of the others' deaths."""
        return self._replicas.replicas

    @property
    def hosts(self) -> list[HostStatus]:
        """The other hosts that have joined, each with its replicas; none with placer 'local'.

        A frontend that has joined the engine sees those that have replicas.
        """
        return self._replicas.placer.hosts or _hosts_of(self.replicas)

    @property
    def num_refused_peers(self) -> int:
        """Peers without a key that have been refused at this frontend's ports."""
        return self._replicas.num_refused

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._replicas.max_model_len

    @property
    def vocab_size(self) -> int:
        """Number of the model's token ids."""
        return self._config.spec.vocab_size

    @property
    def scheduling_policy(self) -> str:
        """The order of waiting requests: 'fcfs' (by arrival) or 'priority' (by their priority)."""
        return self._config.scheduler.scheduling_policy

    @property
    def num_kv_blocks(self) -> int:
        """Size of the KV cache in blocks, of all replicas together."""
        return sum(ready.num_kv_blocks for ready in self._replicas.ready)

    @property
    def block_size(self) -> int:
        """Number of tokens that a KV block holds."""
        return self._replicas.ready[0].block_size

    @property
    def caches(self) -> list[tuple[int, int]]:
        """The tokens of a KV block, and the number of KV blocks, of each replica."""
        return [(ready.block_size, ready.num_kv_blocks) for ready in self._replicas.ready]

    @property
    def device(self) -> str:
        """The device that the engine runs on, as a text for people."""
        size, device = len(self._replicas.ready), self._replicas.ready[0].device
        return device if size == 1 else f"{size} x {device}"

    @property
    def core_pid(self) -> int:
        """Process id of the engine core; with several replicas, of the first one's core."""
        return self._replicas.ready[0].core_pid

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of this frontend, the core and each worker, by name.

        With several replicas the names of the cores and workers begin with 'replica_N_'. Ids of
        replicas on other hosts are of those hosts.
        """
        pids = {"frontend": os.getpid()}
        for status in self.replicas:
            if status.ready is not None:
                prefix = f"replica_{status.number}_" if len(self.replicas) > 1 else ""
                pids[f"{prefix}core"] = status.ready.core_pid
                pids |= {
                    f"{prefix}worker_{rank}": pid
                    for rank, pid in enumerate(status.ready.worker_pids)
                }
        return pids


def _hosts_of(replicas: Iterable[ReplicaStatus]) -> list[HostStatus]:
    """Return the hosts that the replicas which serve have named."""
    found: dict[tuple[str, str], list[int]] = {}
    for status in replicas:
        if status.ready is not None and status.dead is None and status.restarting is None:
            for host in status.ready.hosts.items():
                found.setdefault(host, []).append(status.number)
    return [HostStatus(*host, tuple(numbers)) for host, numbers in found.items()]


def _stalled_s(ping: Answer) -> float:
    """Return the seconds for which a replica's steps in flight have made no progress."""
    return (ping.result or {})["seconds_since_progress"]


def sum_stats(each: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the sums of the replicas' stats, and the means of those that are no counts."""
    stats = list(each)
    total = {name: sum(one[name] for one in stats) for name in stats[0]}
    for name in _MEANS & total.keys():
        total[name] /= len(stats)
    return total
