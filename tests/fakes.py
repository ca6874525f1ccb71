"""Factories for tests, and a loop that plays engine core and worker in one process."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from sidestep.engine_core.kv_cache_manager import KVCacheManager
from sidestep.engine_core.scheduler import Scheduler
from sidestep.executor.fake import FakeRunner
from sidestep.executor.runner import WorkerArgs
from sidestep.ipc.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.messages import AddRequest, Finished, Outputs, Started, pack_ids, unpack_ids
from sidestep.ipc.model_spec import ModelSpec, RopeSpec
from sidestep.ipc.sampling_params import SamplingParams
from sidestep.ipc.step import StepInput, StepOutput

VOCAB_SIZE = 50
SPEC = ModelSpec(
    path="", architecture="LlamaForCausalLM", dtype="float32", vocab_size=VOCAB_SIZE, hidden_size=8,
    intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_position_embeddings=4096,
    rms_norm_eps=1e-6, rope=RopeSpec(theta=10000.0), tie_word_embeddings=True, attention_bias=False,
    attention_output_bias=False, mlp_bias=False, qk_norm=False, windows=(0,), eos_token_ids=())

_made: weakref.WeakSet[Scheduler] = weakref.WeakSet()


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(prompt: list[int], max_tokens: int = 8, *, handle: int = 0, client: int = 0, priority: int = 0,
                 cache_salt: str | None = None, num_public_tokens: int = 0, arrival: float = 0.0,
                 deadline: float | None = None, **sampling: object) -> AddRequest:
    """A request as a frontend would send it."""
    params = SamplingParams(**{"max_tokens": max_tokens, "seed": handle, **sampling})  # type: ignore[arg-type]
    return AddRequest(client=client, handle=handle, request_id=f"request {handle}", prompt_token_ids=pack_ids(prompt),
                      sampling=params, arrival=arrival, priority=priority, cache_salt=cache_salt,
                      num_public_tokens=num_public_tokens, deadline=deadline)


def make_scheduler(*, num_blocks: int = 64, block_size: int = 4, max_num_seqs: int = 8, budget: int = 64,
                   policy: str = "fcfs", prefix_caching: bool = True, max_model_len: int = 4096,
                   eos: tuple[int, ...] = (), clock: Callable[[], float] | None = None,
                   overlap: bool = True) -> Scheduler:
    """A scheduler over a small cache; its invariants are checked after the test."""
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, scheduling_policy=policy,
                             async_scheduling=overlap)
    scheduler = Scheduler(config, config.limits("fake"), KVCacheManager(num_blocks, block_size, prefix_caching),
                          max_model_len=max_model_len, eos_token_ids=eos, clock=clock or Clock())
    _made.add(scheduler)
    return scheduler


@pytest.fixture(autouse=True)
def invariants_hold() -> object:
    """After each test: every scheduler that it made is consistent."""
    yield
    for scheduler in list(_made):
        scheduler.check_invariants()
    _made.clear()


def make_runner(scheduler: Scheduler) -> FakeRunner:
    """A fake device with the scheduler's sizes."""
    cache = CacheConfig(block_size=scheduler.kv.block_size, num_kv_blocks=scheduler.kv.pool.num_blocks)
    return FakeRunner(WorkerArgs(
        rank=0, spec=SPEC, model=ModelConfig(), cache=cache, parallel=ParallelConfig(device="fake"),
        scheduler=scheduler._config, max_model_len=4096))


@dataclass
class Engine:
    """Scheduler and fake device, step by step, with up to `depth` steps in flight; all crosses the wire format."""

    scheduler: Scheduler
    depth: int = 2
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, Finished] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)
    steps: list[StepInput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = make_runner(self.scheduler)
        self._in_flight: deque[bytes] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps that have been launched and not taken back."""
        return len(self._in_flight)

    def launch(self) -> bool:
        """Schedules and runs one step; its output waits. False if there was nothing to run."""
        step = self.scheduler.schedule()
        if step is None:
            # The core would sleep now: with nothing in flight, nobody would wake it.
            assert self._in_flight or not self.scheduler.has_unfinished, f"stuck: {self.scheduler!r}"
            return False
        self.steps.append(step)
        self._check_contract(step)
        data = b"".join(map(bytes, step.encode()))
        output = self.runner.execute(StepInput.decode(data)).wait()
        self._in_flight.append(b"".join(map(bytes, output.encode())))
        self.scheduler.check_invariants()
        return True

    def _check_contract(self, step: StepInput) -> None:
        """What every worker relies on."""
        limits, counts, slots = self.scheduler._limits, step.num_tokens.tolist(), step.slots.tolist()
        assert 0 < sum(counts) <= limits.max_num_batched_tokens and len(counts) <= limits.max_num_seqs
        assert min(counts) > 0 and len(set(slots)) == len(slots)
        first_chunk = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        assert all(count > 1 for count in counts[first_chunk:]), "rows of one token come first"
        new = set(step.new_slots.tolist())
        assert [slot for slot in slots if slot in new] == step.new_slots.tolist(), "new columns follow their rows"

    def take(self) -> None:
        """Gives the oldest output to the scheduler."""
        self._note(self.scheduler.update(StepOutput.decode(self._in_flight.popleft())))
        self.scheduler.check_invariants()

    def turn(self) -> bool:
        """One turn of the core's loop. False when nothing is left to do."""
        while len(self._in_flight) < self.depth and self.launch():
            pass
        self._note(self.scheduler.take_outputs())
        if self._in_flight:
            self.take()
        return bool(self._in_flight) or self.scheduler.has_unfinished

    def run(self, limit: int = 10_000) -> None:
        """Turns until all requests have ended."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"still not idle after {limit} turns: {self.scheduler!r}")

    def _note(self, outputs: dict[int, Outputs]) -> None:
        for box in outputs.values():
            for handle, token in zip(unpack_ids(box.handles), unpack_ids(box.token_ids), strict=True):
                assert int(handle) not in self.finished, "a token came after the end"
                self.tokens[int(handle)].append(int(token))
            for start in box.started:
                assert start.handle not in self.started, "started twice"
                self.started[start.handle] = start
            for finish in box.finished:
                assert finish.handle not in self.finished, "ended twice"
                self.finished[finish.handle] = finish
