"""Measure the cost of a relay: a replica's ranks on this host alone, and over two hosts.

    python benchmarks/host/relay.py [--steps 400] [--step-ms 5] [--streams 64] [--rounds 3]

Two loopback addresses stand for the hosts, so the network itself costs nothing. The fake device
computes two stages, the last of which answers and is behind the relay. The first number is the time
of a step's way to the last rank and back, one step at a time, on a device that takes no time. The
second is the share of the time in which the last stage is busy, when each step takes --step-ms
and as many steps are in flight as in an engine. The rounds take turns, and the script prints a
line for each.
"""

from __future__ import annotations

import argparse
import select
import statistics
import time

from sidestep import DEFAULT_MODEL, EngineArgs, SamplingParams
from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.executor.base import WorkerReady
from sidestep.executor.hosts.multiproc import MultiprocExecutor
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.model.cache_groups import cache_groups
from sidestep.ipc.processes.process import Child
from sidestep.ipc.processes.rank_hosts import RankHost, start_relay
from sidestep.ipc.transport.messages import AddRequest, pack_ids
from sidestep.ipc.transport.step import StepOutput

HERE, THERE = "127.0.0.1", "127.0.0.2"
STAGES = 2


def config_of(step_ms: float, streams: int) -> EngineConfig:
    """Return the configuration of two stages on the fake device."""
    return EngineArgs(
        model=DEFAULT_MODEL,
        device="fake",
        pipeline_parallel_size=STAGES,
        fake_step_ms=step_ms,
        max_num_seqs=streams,
        cpu_threads=1,
    ).create_engine_config()


def scheduler_of(config: EngineConfig, ready: WorkerReady, streams: int, steps: int) -> Scheduler:
    """Return a scheduler with requests for a number of steps."""
    limits = config.scheduler.limits("fake", STAGES)
    scheduler = Scheduler(
        config.scheduler,
        limits,
        KVCacheManager(
            ready.num_kv_blocks,
            ready.block_size,
            True,
            cache_groups(config.spec.layers, config.max_model_len),
            limits.max_tokens_ahead,
        ),
        max_model_len=steps + 64,
        eos_token_ids=(),
        grammars=Grammars("", config.spec.vocab_size, (), time.monotonic),
        clock=time.monotonic,
    )
    for handle in range(streams):
        scheduler.add(
            AddRequest(
                client=0,
                handle=handle,
                request_id=str(handle),
                prompt_token_ids=pack_ids([1, 2, 3]),
                sampling=SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True),
                arrival=0.0,
            )
        )
    return scheduler


class Engine:
    """The executor of one replica, and what drives it as the core does."""

    def __init__(self, config: EngineConfig, *, apart: bool) -> None:
        """Start the ranks. apart: whether the last stage is on the other host."""
        self.config = config
        self._relay: Child | None = None
        hosts: tuple[RankHost, ...] = ()
        if apart:
            self._relay, door = start_relay(THERE)
            here = RankHost("here", HERE, 0, 1)
            hosts = (here, RankHost("there", THERE, 1, 1, relay=door))
        self._executor = MultiprocExecutor(config, hosts=hosts)
        self._executor.launch()
        self._ready = self._executor.start()
        self._poll = select.poll()
        self._poll.register(self._executor.fileno(), select.POLLIN)

    def run(self, streams: int, steps: int, depth: int) -> tuple[list[float], float]:
        """Run all requests to their end.

        Return the microseconds of each step from its sending to its output, and the share of the
        time in which the last stage was busy.
        """
        scheduler = scheduler_of(self.config, self._ready, streams, steps)
        sent: list[float] = []
        waits: list[float] = []
        busy, first, last = 0, 0, 0
        while True:
            while len(sent) < depth and (step := scheduler.schedule()) is not None:
                sent.append(time.perf_counter())
                self._executor.submit(step)
            if not sent:
                return waits, busy / (last - first)
            output = self._next()
            waits.append((time.perf_counter() - sent.pop(0)) * 1e6)
            busy += output.end_ns - output.start_ns
            first, last = first or output.start_ns, output.end_ns
            scheduler.update(output)

    def _next(self) -> StepOutput:
        while True:
            output = self._executor.poll()
            if isinstance(output, StepOutput):
                return output
            assert output is None, output.text
            self._poll.poll()

    def close(self) -> None:
        """End all processes."""
        self._executor.shutdown()
        if self._relay is not None:
            self._relay.stop()


def measure(step_ms: float, streams: int, steps: int, depth: int, *, apart: bool) -> list[float]:
    """Return the median microseconds of a step, and the busy share, of one engine."""
    engine = Engine(config_of(step_ms, streams), apart=apart)
    try:
        waits, busy = engine.run(streams, steps, depth)
    finally:
        engine.close()
    return [statistics.median(waits), busy]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    depth = config_of(args.step_ms, args.streams).scheduler.limits("fake", STAGES)
    print(f"{'ranks':<12} {'us a step, one at a time':>26} {'busy at full depth':>20}")
    for _ in range(args.rounds):
        for apart in (False, True):
            alone, _ = measure(0.0, 1, args.steps, 1, apart=apart)
            _, busy = measure(
                args.step_ms, args.streams, args.steps, depth.max_steps_in_flight, apart=apart
            )
            print(f"{'two hosts' if apart else 'one host':<12} {alone:>26.0f} {busy:>20.4f}")


if __name__ == "__main__":
    main()
