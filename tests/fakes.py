"""Factories for tests, and a loop that plays engine core and worker in one process."""

from __future__ import annotations

import itertools
import select
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from sidestep.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from sidestep.engine_core.scheduling.scheduler import Scheduler
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.executor.base import StepFailed
from sidestep.executor.runner.fake import FakeRunner
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.cache_groups import CacheGroups
from sidestep.ipc.model.layer_spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.model.pooling_spec import PoolingSpec
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls, encode_controls
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.params.structured_outputs_params import Grammar
from sidestep.ipc.transport.messages import (
    AddRequest,
    Finished,
    Outputs,
    Started,
    pack_ids,
    unpack_ids,
)
from sidestep.ipc.transport.step import (
    Columns,
    Float32,
    LogprobColumns,
    StepInput,
    StepMasks,
    StepOutput,
)

VOCAB_SIZE = 50
LAYER = LayerSpec(
    mixer=AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, rope=RopeSpec(theta=10000.0)),
    mlp=MlpSpec(width=8),
)
SPEC = ModelSpec(
    path="",
    architecture="LlamaForCausalLM",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    layers=(LAYER,),
    max_position_embeddings=4096,
    norm=NormSpec(eps=1e-6),
    tie_word_embeddings=True,
)


def make_spec(
    num_layers: int = 1,
    mixer: Mapping[str, Any] | None = None,
    mlp: Mapping[str, Any] | None = None,
    **changes: Any,
) -> ModelSpec:
    """Return SPEC with some fields changed: of the model, and of each layer's two parts."""
    layer = msgspec.structs.replace(
        LAYER,
        mixer=msgspec.structs.replace(LAYER.mixer, **mixer or {}),
        mlp=msgspec.structs.replace(LAYER.mlp, **mlp or {}),
    )
    return msgspec.structs.replace(SPEC, layers=(layer,) * num_layers, **changes)


def layers_of(groups: CacheGroups) -> tuple[LayerSpec, ...]:
    """Return layers, one for each of these cache groups."""
    windows = (0, *groups.windows) if groups.has_full else groups.windows
    return tuple(make_spec(mixer={"window": window}).layers[0] for window in windows)


ONE_GROUP = CacheGroups()
_made: weakref.WeakSet[Scheduler] = weakref.WeakSet()


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_request(
    prompt: list[int],
    max_tokens: int = 8,
    *,
    handle: int = 0,
    client: int = 0,
    priority: int = 0,
    cache_salt: str | None = None,
    num_public_tokens: int = 0,
    arrival: float = 0.0,
    deadline: float | None = None,
    grammar: Grammar | None = None,
    **sampling: Any,
) -> AddRequest:
    """Return a request as a frontend would send it."""
    params = SamplingParams(**{"max_tokens": max_tokens, "seed": handle, **sampling})
    return AddRequest(
        client=client,
        handle=handle,
        request_id=f"request {handle}",
        prompt_token_ids=pack_ids(prompt),
        sampling=params,
        arrival=arrival,
        priority=priority,
        cache_salt=cache_salt,
        num_public_tokens=num_public_tokens,
        deadline=deadline,
        grammar=grammar,
        controls=b"" if grammar is None else encode_controls(Controls(has_grammar=True)),
    )


def make_beam_request(
    prompt: list[int], params: BeamSearchParams, *, handle: int = 0, **more: Any
) -> AddRequest:
    """Return a search as a frontend would send it."""
    plain = make_request(
        prompt,
        params.max_tokens,
        handle=handle,
        ignore_eos=params.ignore_eos,
        temperature=0.0,
        **more,
    )
    return msgspec.structs.replace(plain, beam_search=params)


def make_pooling_request(
    prompt: list[int], pooling: PoolingType = "last", *, handle: int = 0, **more: Any
) -> AddRequest:
    """Return a request for a vector as a frontend would send it."""
    return msgspec.structs.replace(
        make_request(prompt, 1, handle=handle, temperature=0.0, **more), pooling=pooling
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 64,
    policy: str = "fcfs",
    prefix_caching: bool = True,
    max_model_len: int = 4096,
    eos: tuple[int, ...] = (),
    clock: Callable[[], float] | None = None,
    overlap: bool = True,
    target_itl_ms: float | None = None,
    grammars: Grammars | None = None,
    num_stages: int = 1,
    speculative: dict[str, Any] | None = None,
    groups: CacheGroups = ONE_GROUP,
    num_states: int = 0,
) -> Scheduler:
    """Return a scheduler over a small cache; its invariants are checked after the test."""
    clock = clock or Clock()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        scheduling_policy=policy,
        async_scheduling=overlap,
        target_itl_ms=target_itl_ms,
        speculative_config=speculative,
    )
    limits = config.limits("fake", num_stages)
    ahead = limits.max_tokens_ahead
    kv = KVCacheManager(num_blocks, block_size, prefix_caching, groups, ahead, num_states)
    scheduler = Scheduler(
        config,
        limits,
        kv,
        max_model_len=max_model_len,
        eos_token_ids=eos,
        clock=clock,
        grammars=grammars or Grammars("", VOCAB_SIZE, eos, clock),
    )
    _made.add(scheduler)
    return scheduler


@pytest.fixture(autouse=True)
def invariants_hold() -> object:
    """Check after each test that every scheduler it made is consistent."""
    yield
    for scheduler in list(_made):
        scheduler.check_invariants()
    _made.clear()


def make_runner(
    scheduler: Scheduler, vocab_size: int = VOCAB_SIZE, pooling: PoolingType | None = None
) -> FakeRunner:
    """Return a fake device with the scheduler's sizes. pooling: for vectors of this type."""
    cache = CacheConfig(
        block_size=scheduler.kv.block_size, num_kv_blocks=scheduler.kv.pool.num_blocks
    )
    parallel = ParallelConfig(device="fake", pipeline_parallel_size=scheduler._limits.num_stages)
    return FakeRunner(
        WorkerArgs(
            rank=0,
            spec=msgspec.structs.replace(
                SPEC,
                vocab_size=vocab_size,
                layers=layers_of(scheduler.kv.groups),
                pooling=None
                if pooling is None
                else PoolingSpec(task="embed", pooling=pooling, width=8, activation="none"),
            ),
            model=ModelConfig(),
            cache=cache,
            parallel=parallel,
            scheduler=scheduler._config,
            max_model_len=4096,
        )
    )


def _on_the_wire(message: Columns) -> bytes:
    return b"".join(map(bytes, message.encode()))


@dataclass
class Engine:
    """Scheduler and device, run step by step with up to `depth` steps in flight.

    The device is a fake one if none is given. All messages cross the wire format.
    """

    scheduler: Scheduler
    depth: int = 2
    vocab_size: int = VOCAB_SIZE
    runner: Any = None
    """The device."""
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finished: dict[int, Finished] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[int, list[int]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """For each sampled token: its position, and the tokens whose logprobs the frontend got."""
    vectors: dict[int, Float32] = field(default_factory=dict)
    steps: list[StepInput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = self.runner or make_runner(self.scheduler, self.vocab_size)
        self._in_flight: deque[bytes] = deque()
        self._masks: deque[bytes] = deque()

    @property
    def num_in_flight(self) -> int:
        """Return the number of steps that have been launched and not taken back."""
        return len(self._in_flight)

    def launch(self) -> bool:
        """Schedule one step, which then waits to be run. Return False if there is none to run."""
        step = self.scheduler.schedule()
        if step is None:
            # The core would sleep now: with nothing in flight, no output would wake it.
            assert (
                self._in_flight
                or not self.scheduler.has_unfinished
                or self.scheduler.grammars.num_compiling
            ), f"stuck: {self.scheduler!r}"
            return False
        self.steps.append(step)
        self._check_contract(step)
        self._in_flight.append(_on_the_wire(step))
        self._take_masks()
        self.scheduler.check_invariants()
        return True

    def _check_contract(self, step: StepInput) -> None:
        """Check the step against the contract that every worker relies on."""
        limits, counts, slots = (
            self.scheduler._limits,
            step.num_tokens.tolist(),
            step.slots.tolist(),
        )
        assert (
            0 < sum(counts) + len(counts) * step.num_drafts <= limits.max_num_batched_tokens
            and len(counts) <= limits.max_num_seqs
        )
        assert step.num_drafts == 0 or max(counts) == 1, "drafts beside prompts"
        assert min(counts) > 0 and len(set(slots)) == len(slots)
        first_chunk = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        assert all(count > 1 for count in counts[first_chunk:]), "rows of one token come first"
        if first_chunk == len(counts) and step.num_drafts == 0:
            self._check_keys(counts, slots)
        assert not set(step.copy_sources.tolist()) & set(step.copy_targets.tolist()), (
            "a source is a target"
        )
        assert len(set(step.copy_targets.tolist())) == len(step.copy_targets), "a target twice"
        new = set(step.entering["slot"].tolist())
        assert [slot for slot in slots if slot in new] == step.entering["slot"].tolist(), (
            "new columns follow their rows"
        )

    def _check_keys(self, counts: list[int], slots: list[int]) -> None:
        """Check that in a step without prompts no row sees a key that another row writes.

        Kernels may read keys of earlier steps while those of the step are written.
        """
        roster = self.scheduler._roster
        running = {request.slot: request for request in (*roster.running, *roster.leaving)}
        size, written, seen = self.scheduler.kv.block_size, {}, {}
        for count, slot in zip(counts, slots, strict=True):
            blocks, end = running[slot].blocks.ids, running[slot].num_computed
            seen[slot] = set(blocks[: -(-end // size)])
            written[slot] = set(blocks[(end - count) // size : -(-end // size)])
        for one, other in itertools.permutations(slots, 2):
            assert not seen[one] & written[other], "a row sees a key that its step writes"

    def take(self) -> None:
        """Run the oldest step and give its output to the scheduler."""
        step = StepInput.decode(self._in_flight.popleft())
        output = self.runner.execute(step, lambda: StepMasks.decode(self._masks.popleft())).wait()
        output = StepOutput.decode(_on_the_wire(output))
        self.scheduler.follow(output)
        self._take_masks()
        self._note(self.scheduler.update(output))
        self.scheduler.check_invariants()

    def fail(self, cause: Literal["oom", "exception"] = "exception", slot: int = -1) -> None:
        """Let the oldest step fail, so that all steps in flight are lost.

        slot: that of the row which is to blame; -1 for none.
        """
        step = StepInput.decode(self._in_flight[0])
        self._in_flight.clear()
        self._masks.clear()
        self.runner.reset()
        text = "PlannedFaultError: as the test wants"
        self.scheduler.take_back(
            StepFailed(step_id=step.step_id, cause=cause, text=text, slot=slot)
        )
        self.scheduler.check_invariants()

    def _take_masks(self) -> None:
        """Send the masks as the core does: between their step and the next."""
        masks = self.scheduler.take_masks()
        if masks is not None:
            assert masks.step_id == self.steps[-1].step_id, "steps behind it have been sent"
            self._masks.append(_on_the_wire(masks))

    def turn(self) -> bool:
        """Run one turn of the core's loop. Return False when nothing is left to do."""
        while len(self._in_flight) < self.depth and self.launch():
            pass
        self._note(self.scheduler.take_outputs())
        if self._in_flight:
            self.take()
        elif self.scheduler.has_unfinished:
            select.select([self.scheduler.grammars.fileno()], [], [])
        return bool(self._in_flight) or self.scheduler.has_unfinished

    def run(self, limit: int = 10_000) -> None:
        """Run turns until all requests have ended."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"still not idle after {limit} turns: {self.scheduler!r}")

    def _note(self, outputs: dict[int, Outputs]) -> None:
        for box in outputs.values():
            for handle, token in zip(
                unpack_ids(box.handles), unpack_ids(box.token_ids), strict=True
            ):
                assert int(handle) not in self.finished, "a token came after the end"
                self.tokens[int(handle)].append(int(token))
            if box.logprobs:
                columns = LogprobColumns.unpack(box.logprobs)
                ids = np.split(columns.token_ids, np.cumsum(columns.sizes)[:-1])
                for handle, position, tokens in zip(
                    columns.keys, columns.positions, ids, strict=True
                ):
                    self.logprobs[int(handle)].append((int(position), tokens.tolist()))
            if box.pooled:
                handles = unpack_ids(box.pooled).tolist()
                rows = np.frombuffer(box.vectors, np.float32).reshape(len(handles), -1)
                assert not self.vectors.keys() & set(handles), "a vector came twice"
                self.vectors |= dict(zip(handles, rows, strict=True))
            for start in box.started:
                assert start.handle not in self.started, "started twice"
                self.started[start.handle] = start
            for finish in box.finished:
                assert finish.handle not in self.finished, "ended twice"
                self.finished[finish.handle] = finish
