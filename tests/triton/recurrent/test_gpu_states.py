"""The GPU's runner keeps states of recurrent layers as the CPU's does.

Its kernels run in Triton's interpreter, and all other code is its own (see gpu_stand_in.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from sidestep.executor.gpu import gpu_runner
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.layers.experts.router import Router
from sidestep.executor.recurrent import state_words
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.transport.messages import unpack_ids
from sidestep.ipc.transport.step import StepInput
from sidestep.ipc.transport.worker_calls import (
    AnyCall,
    CallResult,
    MemoryUse,
    SentCall,
    Sleep,
    WakeUp,
)
from tests.e2e.models import random_prompts, write_model
from tests.fakes import Engine, make_beam_request, make_request, make_scheduler
from tests.triton.gpu_stand_in import standing_in, worker_args
from tests.triton.support import INTERPRETED
from tests.unit.executor.steps import Request, make_step
from tests.unit.executor.test_model_runner import VOCAB, make_runner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    # The padding is NaN (see standing_in), and numpy warns of it.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small model of one recurrent layer and one with attention."""
    return write_model(
        "qwen3.5",
        tmp_path_factory.mktemp("model"),
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )


@pytest.fixture(scope="module")
def runner(model: str, one_thread: None) -> GpuRunner:
    with standing_in():
        return GpuRunner(worker_args(model))


def tokens_of(runner: Runner, steps: Sequence[StepInput]) -> list[list[int]]:
    return [runner.execute(step).wait().token_ids.tolist() for step in steps]


def steps_with_a_checkpoint() -> list[StepInput]:
    """Return steps in which a row of one token saves, and another request begins from that."""
    first, second = Request(range(1, 21), 4), Request([*range(1, 17), 9, 8, 7], 3)
    save, later = make_step([(0, 1, [])], {}, 2), make_step([(0, 1, []), (1, 3, [0, 2])], {}, 4)
    save.saved_slots, save.saved_counts, save.saved_states = np.array([[0], [1], [7]], np.int32)
    later.slots, later.num_new_blocks = np.array([0, 1], np.int32), np.array([0, 2], np.int32)
    later.entering = make_step([(1, 3, [])], {1: second}).entering
    for name, value in {"num_computed": 16, "num_sent": 3}.items():
        later.entering[name] = value
    later.new_token_ids = np.array([9, 8, 7], np.int32)
    later.state_copy_sources, later.state_copy_targets = np.array([[7], [1]], np.int32)
    return [
        make_step([(0, 12, [0])], {0: first}, 0),
        make_step([(0, 3, [])], {}, 1),
        save,
        make_step([(0, 4, [1])], {}, 3),
        later,
        make_step([(0, 1, []), (1, 1, [])], {}, 5),
    ]


@pytest.mark.parametrize("eager", [False, True])
def test_a_request_begins_from_a_saved_state(
    eager: bool, runner: GpuRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner._model.graphs is not None
    if eager:
        monkeypatch.setattr(runner._model, "graphs", None)
    expected = tokens_of(make_runner(model), steps_with_a_checkpoint())
    with standing_in():
        assert tokens_of(runner, steps_with_a_checkpoint()) == expected
    assert [len(tokens) for tokens in expected] == [0, 0, 0, 1, 2, 2]


def test_a_shared_expert_that_is_one_more_of_the_others(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare it with a CPU's, where it is by itself; attention has a gate too."""
    path = write_model(
        "qwen3-next",
        tmp_path,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[],
        shared_expert_intermediate_size=24,
    )
    alone = tokens_of(make_runner(path), steps_with_a_checkpoint())
    joined = []
    join = Router.join

    def note(router: Router, gate: Tensor | None) -> None:
        joined.append(router)
        join(router, gate)

    monkeypatch.setattr(Router, "join", note)
    with standing_in():
        made = GpuRunner(worker_args(path))
        assert tokens_of(made, steps_with_a_checkpoint()) == alone
    assert len(joined) == 2


@pytest.mark.parametrize("few", [state_words.FEW_SAVES, 0])
def test_a_scheduler_s_steps_give_what_they_give_on_a_cpu(
    few: int, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run common prefixes, choices and a beam search, with fewer states than are of use.

    With few = 0 each step that saves takes the kernels for many saves.
    """
    for module in (state_words, gpu_runner):
        monkeypatch.setattr(module, "FEW_SAVES", max(1, few) if module is state_words else few)

    def serve(device: Runner) -> dict[int, list[int]]:
        scheduler = make_scheduler(
            num_blocks=20, block_size=16, max_num_seqs=5, budget=24, max_model_len=48, num_states=7
        )
        engine = Engine(scheduler, runner=device)
        for i, prompt in enumerate(random_prompts(2, VOCAB, longest=14, seed=8)):
            scheduler.add(make_request([*range(20), *prompt], 5, handle=i, temperature=0.8 * i))
        engine.run()
        scheduler.add(make_request([*range(20), 7, 8], 4, handle=2, n=2, temperature=1.0))
        search = BeamSearchParams(beam_width=2, max_tokens=4)
        scheduler.add(make_beam_request([7, 8, 9], search, handle=4))
        engine.run()
        assert any(len(step.state_copy_sources) for step in engine.steps)
        assert any(len(step.saved_states) for step in engine.steps)
        beams = engine.finished[4].beams
        assert len(engine.finished) == 5 and len(beams) == 2
        return engine.tokens | {
            5 + i: unpack_ids(beam.token_ids).tolist() for i, beam in enumerate(beams)
        }

    expected = serve(make_runner(model))
    args = worker_args(model)
    scheduler = dataclasses.replace(args.scheduler, max_num_batched_tokens=24)
    with standing_in():
        made = GpuRunner(dataclasses.replace(args, scheduler=scheduler))
        assert made.ready.num_states == 11
        assert serve(made) == expected


def test_a_sleep_frees_the_states(runner: GpuRunner) -> None:
    def call(asked: AnyCall) -> CallResult:
        answer = runner.answer(SentCall(number=0, call=asked))
        assert answer.error is None
        return answer.result

    with standing_in():
        expected = tokens_of(runner, steps_with_a_checkpoint())
        awake, kernels = call(MemoryUse()), runner._model.kernels
        assert kernels is not None and kernels.recurrent is not None
        cache = kernels.attention.cache.nbytes
        assert awake["kv_cache"] == cache + kernels.recurrent.nbytes > cache
        del kernels
        call(Sleep(level=2))
        assert call(MemoryUse())["kv_cache"] == 0
        call(WakeUp())
        assert call(MemoryUse()) == awake
        assert tokens_of(runner, steps_with_a_checkpoint()) == expected
