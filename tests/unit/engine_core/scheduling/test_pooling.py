"""Requests for vectors in the scheduler: each ends with its prompt, whatever happens to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sidestep.ipc.config_sections import SchedulerConfig
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.pooling_params import POOLING_TYPES, PoolingType
from sidestep.ipc.transport.messages import FinishReason
from sidestep.ipc.transport.step import Float32
from tests.e2e.models import random_prompts, write_model
from tests.fakes import Engine, make_pooling_request, make_runner, make_scheduler
from tests.unit.executor.test_model_runner import make_runner as make_cpu_runner

PROMPTS = random_prompts(12, 50, longest=45)
KINDS = pytest.mark.parametrize("kind", POOLING_TYPES)


def run(
    kind: PoolingType,
    prompts: list[list[int]],
    depth: int = 2,
    runner: Any = None,
    preempting: bool = False,
    **options: Any,
) -> Engine:
    """Return an engine that has run these prompts, added together.

    preempting: those with odd indices come two turns later, and are urgent.
    """
    policy = "priority" if preempting else "fcfs"
    scheduler = make_scheduler(**{"policy": policy, "overlap": depth == 2, **options})
    engine = Engine(scheduler, depth, runner=runner or make_runner(scheduler, pooling=kind))
    requests = [
        make_pooling_request(prompt, kind, handle=i, priority=(i + 1) % 2 * preempting)
        for i, prompt in enumerate(prompts)
    ]
    late = requests[1::2] if preempting else []
    for request in requests[::2] if preempting else requests:
        scheduler.add(request)
    if preempting:
        engine.turn()
        engine.turn()
    for request in late:
        scheduler.add(request)
    engine.run()
    assert not engine.tokens and len(engine.vectors) == len(prompts)
    assert all(end.reason is FinishReason.STOP for end in engine.finished.values())
    return engine


def alone(kind: PoolingType) -> dict[int, Float32]:
    """Return the vectors of the prompts, each computed alone and in one step."""
    return {i: run(kind, [prompt]).vectors[0] for i, prompt in enumerate(PROMPTS)}


def check(engine: Engine, expected: dict[int, Float32]) -> None:
    for handle, vector in expected.items():
        np.testing.assert_allclose(engine.vectors[handle], vector, atol=1e-5)


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {"depth": 1},
        {"budget": 9},
        {"budget": 9, "num_stages": 3, "depth": 4},
        {"prefix_caching": False, "budget": 20, "max_num_seqs": 2},
    ],
    ids=str,
)
def test_vectors_are_the_same_in_any_batch_and_chunking(
    kind: PoolingType, options: dict[str, Any]
) -> None:
    """All 12 prompts run twice; the second time their prefixes are in the cache."""
    engine = run(kind, [*PROMPTS, *PROMPTS], **options)
    expected = alone(kind)
    check(engine, expected | {i + 12: vector for i, vector in expected.items()})


@KINDS
def test_only_vectors_of_the_last_token_are_made_with_cached_prefixes(kind: PoolingType) -> None:
    engine = run(kind, [[7] * 40, [7] * 40], max_num_seqs=1)
    computed = sum(int(step.num_tokens.sum()) for step in engine.steps)
    assert computed == (40 + 4 if kind == "last" else 80)


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_has_the_same_vector(kind: PoolingType, depth: int) -> None:
    engine = run(kind, PROMPTS, depth, preempting=True, num_blocks=14, budget=12, max_model_len=56)
    assert sum(end.num_preemptions for end in engine.finished.values()) > 0
    check(engine, alone(kind))


@KINDS
def test_a_model_makes_the_same_vectors_after_preemptions(
    kind: PoolingType, tmp_path: Path, one_thread: None
) -> None:
    path = write_model("llama-gqa", tmp_path, num_hidden_layers=2)
    spec = load_model_spec(path, runner="pooling", pooler={"pooling_type": kind})

    def vectors(**options: Any) -> Engine:
        limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
        runner = make_cpu_runner(path, block_size=4, num_kv_blocks=64, spec=spec, scheduler=limits)
        return run(kind, PROMPTS, runner=runner, **options)

    small = vectors(preempting=True, num_blocks=14, budget=12, max_model_len=56)
    assert sum(end.num_preemptions for end in small.finished.values()) > 0
    check(small, vectors().vectors)


@KINDS
def test_an_aborted_request_leaves_nothing_behind(kind: PoolingType) -> None:
    scheduler = make_scheduler(budget=8)
    engine = Engine(scheduler, runner=make_runner(scheduler, pooling=kind))
    for handle in range(3):
        scheduler.add(make_pooling_request([3] * 30, kind, handle=handle))
    engine.turn()
    scheduler.abort(0, [0, 2])
    engine.run()
    assert list(engine.vectors) == [1]
    assert scheduler.kv.usage == 0


def test_a_prompt_that_fits_without_any_output_runs() -> None:
    engine = run("last", [[4] * 16], max_model_len=16)
    assert list(engine.vectors) == [0]
    engine.scheduler.add(make_pooling_request([4] * 17, handle=1))
    engine.run()
    error = engine.finished[1].error
    assert error is not None and "17 tokens are more than the 16 that fit" in error
