"""Rows of a GPU's runner go on from the state of the last draft that was accepted.

Its kernels run in Triton's interpreter, and all other code is its own (see gpu_stand_in.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.kv_cache_size import state_bytes
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.transport.messages import AddRequest, unpack_ids
from tests.e2e.models import random_prompts, write_model
from tests.fakes import Engine, make_beam_request, make_request, make_scheduler
from tests.triton.gpu_stand_in import speculative, standing_in, worker_args
from tests.triton.guessing import guessing, texts
from tests.triton.support import INTERPRETED, run_interpreted
from tests.unit.executor.test_model_runner import VOCAB, make_runner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    # The padding is NaN (see standing_in), and numpy warns of it.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]
LAYERS = ["linear_attention", "full_attention"]
DRAFTS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small model of one recurrent layer and one with attention."""
    folder = tmp_path_factory.mktemp("model")
    return write_model("qwen3.5", folder, num_hidden_layers=2, layer_types=LAYERS)


@pytest.fixture(scope="module")
def runner(model: str, one_thread: None) -> GpuRunner:
    with standing_in():
        return GpuRunner(worker_args(model, drafts=DRAFTS))


def waves() -> list[list[AddRequest]]:
    """Return requests that come one wave after the other, and find what others have left."""
    shared = list(range(20))
    first = [
        make_request([*shared, *prompt], 9, handle=i, temperature=0.8 * (i == 1))
        for i, prompt in enumerate(random_prompts(3, VOCAB, longest=14, seed=8))
    ]
    then = [
        make_request([*shared, 7, 8], 7, handle=3, n=2, temperature=1.0),
        make_request([*shared, 30, 31], 8, handle=5, temperature=0.0, presence_penalty=0.5),
        make_beam_request([7, 8, 9], BeamSearchParams(beam_width=2, max_tokens=4), handle=6),
    ]
    return [first, then]


@dataclass
class Served:
    engine: Engine
    beams: list[list[int]]


def serve(
    device: Runner, drafts: int, waves: Sequence[Sequence[AddRequest]], num_blocks: int = 20
) -> Served:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=5,
        budget=24,
        max_model_len=48,
        num_states=7,
        speculative=speculative(drafts) if drafts else None,
    )
    engine = Engine(scheduler, runner=device)
    with standing_in() if isinstance(device, GpuRunner) else nullcontext():
        for wave in waves:
            for request in wave:
                scheduler.add(request)
            engine.run()
    ends = engine.finished.values()
    beams = [unpack_ids(beam.token_ids).tolist() for end in ends for beam in end.beams]
    return Served(engine, beams)


def test_tokens_are_those_of_a_cpu_without_drafts(runner: GpuRunner, model: str) -> None:
    """Run common prefixes, choices, penalties and a beam search, with few states."""
    added = waves()
    expected = serve(make_runner(model), 0, added)
    known = texts([r for r in added[0] + added[1] if r.handle != 6], expected.engine.tokens)
    with guessing(runner, known, 0.7) as accepted:
        got = serve(runner, DRAFTS, added)
    assert (got.engine.tokens, got.beams) == (expected.engine.tokens, expected.beams)
    steps = got.engine.steps
    assert any(len(step.state_copy_sources) for step in steps), "nobody begins from another's state"
    assert any(len(step.saved_states) for step in steps)
    assert set().union(*accepted) == set(range(DRAFTS + 1))
    assert any(len(set(step)) > 1 for step in accepted), "all rows accept the same number"


def test_preempted_requests_go_on_with_the_same_tokens(runner: GpuRunner, model: str) -> None:
    prompts = random_prompts(4, VOCAB, longest=14, seed=2)
    added = [make_request(p, 12, handle=i, temperature=0.0) for i, p in enumerate(prompts)]
    expected = serve(make_runner(model), 0, [added])
    with guessing(runner, texts(added, expected.engine.tokens), 0.8) as accepted:
        got = serve(runner, DRAFTS, [added], num_blocks=5)
    assert got.engine.tokens == expected.engine.tokens
    ends = got.engine.finished.values()
    assert any(end.num_preemptions for end in ends), "blocks did for all"
    assert any(max(step) for step in accepted)


def test_a_state_has_memory_for_each_draft(runner: GpuRunner) -> None:
    kernels, setup = runner._model.kernels, runner._setup
    assert kernels is not None and kernels.recurrent is not None
    size = state_bytes(setup.args, replace(setup.limits, num_drafts=0), 4) * (1 + DRAFTS)
    assert size == state_bytes(setup.args, setup.limits, 4)
    assert kernels.recurrent.nbytes == runner.ready.num_states * size


def test_stages_give_the_tokens_of_one_without_drafts(tmp_path: Path) -> None:
    """Every stage finds its own states (tests/triton/sums/gpu_ranks.py)."""
    model = write_model("qwen3.5", tmp_path, num_hidden_layers=2, layer_types=LAYERS)
    (got,), expected = json.loads(
        run_interpreted("tests.triton.sums.gpu_ranks", model, "1", "2", "2")
    )
    counts = [len(tokens) for tokens in got]
    assert got == [all_[:n] for all_, n in zip(expected, counts, strict=True)]
    assert min(counts) >= 5 and max(counts) >= 7
