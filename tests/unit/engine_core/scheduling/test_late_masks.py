"""Masks that take long.

The rows beside them go on, the late rows lose only turns, and no token changes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from llguidance import LLExecutor, LLMatcher

from sidestep.engine_core.requests.grammar_state import GrammarState
from sidestep.engine_core.requests.mask_job import FOREVER
from sidestep.engine_core.requests.request import Request
from sidestep.engine_core.structured_outputs.grammars import Grammars
from sidestep.engine_core.structured_outputs.mask_jobs import MaskJobs
from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.runner.fake import expected_tokens
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.frontend.input.output_form import make_grammar
from sidestep.ipc.config_sections import (
    DEFAULT_MODEL,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.logits_controls import GRAMMAR_ALONE, Controls, encode_controls
from sidestep.ipc.params.structured_outputs_params import StructuredOutputsParams
from sidestep.ipc.transport.messages import AddRequest, FinishReason
from tests.fakes import Clock, Engine, make_request, make_scheduler
from tests.small_grammars import matcher_of

VOCAB, EOS = 4096, (0, 2)
WORDS = [StructuredOutputsParams(regex=f"({first}[a-z]{{1,3}} ){{200}}") for first in "abcdefgh"]


class Gated:
    """The library's executor, behind a gate for each matcher.

    A mask begins only once the gate is open, or some seconds have gone by.
    """

    def __init__(self, real: LLExecutor, seconds: float | None) -> None:
        self._real = real
        self._seconds = seconds
        self._changed = threading.Condition()
        self._shut: set[int] = set()
        self.problem: BaseException | None = None

    def shut(self, matchers: Iterable[LLMatcher]) -> None:
        with self._changed:
            self._shut |= set(map(id, matchers))

    def open(self) -> None:
        with self._changed:
            self._shut.clear()
            self._changed.notify_all()

    def unsafe_compute_mask_ptr(self, matchers: list[tuple[LLMatcher, int]], *where: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._shut & {id(matcher) for matcher, _ in matchers}, self._seconds
            )
        if self.problem is not None:
            raise self.problem
        self._real.unsafe_compute_mask_ptr(matchers, *where)

    def consume_token_par(self, tokens: list[tuple[LLMatcher, int]]) -> None:
        self._real.consume_token_par(tokens)


@pytest.fixture
def grammars() -> Grammars:
    """Return compiled grammars with threads, whatever machine this is.

    All are compiled, so that requests begin when they come.
    """
    made = Grammars(DEFAULT_MODEL, VOCAB, EOS, Clock(), num_workers=8)
    made.load()
    run = engine(made)
    for handle in range(len(WORDS)):
        run.scheduler.add(held(handle, 1))
    run.run()
    return made


def held(
    handle: int, max_tokens: int, controls: bytes = GRAMMAR_ALONE, **options: Any
) -> AddRequest:
    """Return a request with a grammar that no other has, as its frontend sends it."""
    message = make_request(
        [5, 6, handle],
        max_tokens,
        handle=handle,
        grammar=make_grammar(WORDS[handle], {}),
        **options,
    )
    return msgspec.structs.replace(message, controls=controls)


def engine(grammars: Grammars, runner: Any = None, *, overlap: bool = True, **sizes: Any) -> Engine:
    sizes = {"num_blocks": 100, "block_size": 16, "max_num_seqs": 16} | sizes
    scheduler = make_scheduler(
        grammars=grammars, eos=EOS, overlap=overlap, clock=grammars._clock, **sizes
    )
    return Engine(
        scheduler, depth=scheduler._limits.max_steps_in_flight, vocab_size=VOCAB, runner=runner
    )


def gate_of(grammars: Grammars, seconds: float | None = None) -> Gated:
    threads: Any = grammars
    gate = Gated(threads._executor, seconds)
    threads._executor = threads._masks._executor = gate
    return gate


def serve(run: Engine, lengths: dict[int, int]) -> None:
    """Serve requests with the grammars of these numbers, until each has sampled."""
    for handle, length in lengths.items():
        run.scheduler.add(held(handle, length))
    while not all(run.tokens[handle] for handle in lengths):
        run.turn()


@pytest.mark.parametrize("overlap", [True, False])
def test_one_that_takes_long_holds_nobody_up(overlap: bool, grammars: Grammars) -> None:
    gate, runs = gate_of(grammars), [engine(grammars, overlap=overlap) for _ in range(2)]
    for run in runs:
        serve(run, dict.fromkeys(range(5), 40))
        run.scheduler.add(make_request([1, 2], 90, handle=9, ignore_eos=True))
        if run is runs[0]:
            before = len(run.tokens[2])
            gate.shut([matcher_of(run.scheduler._requests[0, 2])])
            while len(run.finished) < 4:  # the step would never end if it waited for them
                run.turn()
            assert (
                run.finished.keys() == {0, 1, 3, 4} and before <= len(run.tokens[2]) <= before + 2
            )
            assert run.scheduler.stats()["num_postponed_tokens"] > 30
            gate.open()
        run.run()
    assert runs[0].tokens == runs[1].tokens and len(runs[0].finished) == 6
    assert runs[0].tokens[9] == expected_tokens([1, 2], 90, 9, VOCAB)


def entries(run: Engine, slot: int) -> int:
    """Count how often a slot's row was brought anew."""
    return sum(slot in step.entering["slot"].tolist() for step in run.steps)


def test_no_more_than_a_quarter_of_a_step_is_left_behind(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let most rows of a step be late: it would compute little, so it waits a while for them."""
    monkeypatch.setattr("sidestep.engine_core.scheduling.scheduler._LONGEST_S", 60.0)
    gate, run = gate_of(grammars, 0.02), engine(grammars)
    serve(run, dict.fromkeys(range(4), 40))
    gate.shut(matcher_of(run.scheduler._requests[0, handle]) for handle in range(4))
    first = len(run.steps)
    run.run()
    assert 0 < max(len(step.entering["slot"]) for step in run.steps[first:]) <= 1
    assert all(finish.reason == FinishReason.LENGTH for finish in run.finished.values())


def test_in_the_end_a_step_waits_for_nobody(grammars: Grammars) -> None:
    """Let all rows with grammars but one be late, for longer than any step waits."""
    gate, run = gate_of(grammars), engine(grammars)
    serve(run, dict.fromkeys(range(4), 40))
    run.scheduler.add(make_request([1, 2], 40, handle=9, ignore_eos=True))
    gate.shut(matcher_of(run.scheduler._requests[0, handle]) for handle in range(1, 4))
    while 0 not in run.finished or 9 not in run.finished:
        run.turn()
    assert run.finished.keys() == {0, 9}
    gate.open()
    run.run()
    assert run.tokens[9] == expected_tokens([1, 2], 40, 9, VOCAB)


class Slow:
    """A matcher whose masks take some milliseconds of a processor."""

    num_computed = 0

    def unsafe_compute_mask_ptr(self, where: int, size: int) -> None:
        until = time.thread_time() + 2e-3
        while time.thread_time() < until:
            pass
        self.num_computed += 1


def test_the_core_itself_stops_computing_when_the_time_is_over() -> None:
    """Use one thread: the core computes the masks itself.

    Rows that were not begun are computed later, and none twice.
    """
    slow, jobs = Slow(), MaskJobs(4, None)
    # It has what is called.
    grammars = [GrammarState("", matcher=slow) for _ in range(200)]  # type: ignore[arg-type]
    found = jobs.compute(grammars, 0, 0.0, 20e-3)
    rest = [grammar for grammar, mask in zip(grammars, found, strict=True) if mask is None]
    assert 0 < len(rest) < len(grammars) == len(rest) + slow.num_computed
    assert all(
        grammar.mask_s >= 2e-3 for grammar in grammars
    )  # rows not begun get the time of others
    found = jobs.compute(rest, 0, 0.0, FOREVER)
    assert all(mask is not None for mask in found) and slow.num_computed == len(grammars)


def test_what_a_thread_raises_is_raised_where_its_masks_are_asked_for(grammars: Grammars) -> None:
    """Raise in a thread: a thread that died in silence would leave all requests waiting."""
    requests = [Request.from_message(held(handle, 9), 100, frozenset()) for handle in range(5)]
    for handle, request in enumerate(requests):
        assert grammars.start(request, make_grammar(WORDS[handle], {})) is None
    gate_of(grammars).problem = RuntimeError("the library's own")
    with pytest.raises(RuntimeError, match="the library's own"):
        grammars.masks(requests, 1, 0.0, 1.0)


def test_late_ones_may_be_aborted_preempted_and_over(grammars: Grammars) -> None:
    """Change at random which masks are late, with blocks for half of the requests.

    Masks of aborted requests never come. Two requests are choices of one request.
    """

    def add_all(run: Engine) -> None:
        for handle in range(7):
            run.scheduler.add(held(handle, 20 + handle, n=1 + handle // 6))

    expected = engine(grammars)
    add_all(expected)
    expected.run()
    gate, rng, run = (
        gate_of(grammars, 0.02),
        random.Random(5),
        engine(grammars, num_blocks=12, block_size=8),
    )
    add_all(run)
    while run.turn():
        running = [
            r for r in run.scheduler._roster.running if r.handle != 3 and r.grammar is not None
        ]
        gate.open()
        if running:
            gate.shut([matcher_of(rng.choice(running))])
        if len(run.tokens[3]) > 5 and 3 not in run.finished and (0, 3) in run.scheduler._requests:
            run.scheduler.abort(0, [3])
    gate.open()
    stats = run.scheduler.stats()
    assert stats["num_postponed_tokens"] > 10 and stats["num_preemptions"] > 0
    for handle in {*range(8)} - {3}:
        assert run.tokens[handle] == expected.tokens[handle], handle
    assert run.tokens[3] == expected.tokens[3][: len(run.tokens[3])] and 3 not in run.finished


CONTROLS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"bad_words": [[7]]},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.7},
    {"logit_bias": {9: 4.0}},
    {},
    {"logprobs": 0, "repetition_penalty": 1.3},
]


def test_a_model_gives_the_same_tokens(grammars: Grammars, one_thread: None) -> None:
    """Check that a row that enters again computes the same token as before.

    Its other parameters vary, and its output is sent once.
    """

    def runner() -> ModelRunner:
        made = ModelRunner(
            WorkerArgs(
                rank=0,
                spec=load_model_spec(DEFAULT_MODEL),
                model=ModelConfig(DEFAULT_MODEL, dtype="float32"),
                cache=CacheConfig(block_size=16, num_kv_blocks=100),
                parallel=ParallelConfig(device="cpu"),
                scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
                max_model_len=128,
            )
        )
        return made

    gate, rng, runs = (
        gate_of(grammars, 0.02),
        random.Random(3),
        [engine(grammars, runner()) for _ in range(2)],
    )
    for run in runs:
        for handle in range(8):
            controls = encode_controls(Controls(has_grammar=True, **CONTROLS[handle]))
            run.scheduler.add(held(handle, 24, controls, temperature=1.0 - handle % 2))
        while run.turn():
            gate.open()
            running = [
                matcher_of(r) for r in run.scheduler._roster.running if r.grammar is not None
            ]
            if run is runs[0] and len(running) >= 4:
                gate.shut(rng.sample(running, 2))
        gate.open()
    assert runs[0].tokens == runs[1].tokens and len(runs[0].finished) == 8
    assert runs[0].logprobs == runs[1].logprobs and runs[0].logprobs.keys() == {1, 7}
    assert [position for position, _ in runs[0].logprobs[1]] == list(range(3, 27))
    assert runs[0].scheduler.stats()["num_postponed_tokens"] > 10
