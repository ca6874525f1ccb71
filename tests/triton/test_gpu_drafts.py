"""The GPU's runner verifies drafts, and the tokens are those of a CPU without speculation.

Its kernels run in Triton's interpreter, and all other code is its own (see gpu_stand_in.py).
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.messages import AddRequest, unpack_ids
from sidestep.ipc.transport.step import LogprobColumns, StepInput, StepMasks, StepOutput
from tests.e2e.models import random_prompts, write_model
from tests.fakes import Engine, make_beam_request, make_request, make_scheduler
from tests.triton.gpu_stand_in import speculative, standing_in, worker_args
from tests.triton.guessing import guessing, texts
from tests.triton.support import INTERPRETED, run_interpreted
from tests.unit.executor.sampling.test_grammar_masks import words_of
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
    """Return a small model of one layer: the interpreter takes its time."""
    return write_model("llama-gqa", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=[1, 4])
def drafting(request: pytest.FixtureRequest, model: str, one_thread: None) -> tuple[GpuRunner, int]:
    """Return a runner with some number of drafts, and that number."""
    with standing_in():
        made = GpuRunner(worker_args(model, drafts=request.param))
    return made, request.param


FOUR = pytest.mark.parametrize("drafting", [4], indirect=True)
"""Runs a test with four drafts alone: the interpreter takes its time."""


def requests() -> list[AddRequest]:
    """Return requests of many kinds, whose prompts and outputs repeat themselves."""
    loops = [prompt * 3 for prompt in random_prompts(3, VOCAB, longest=5, seed=3)]
    return [
        make_request(loops[0], 12, handle=0, temperature=0.0, logprobs=1),
        make_request(loops[1], 12, handle=1, temperature=0.8, top_k=3, frequency_penalty=0.4),
        make_request(loops[2], 9, handle=2, temperature=0.0),
        make_request(loops[0], 9, handle=3, temperature=0.0, presence_penalty=0.5, logprobs=2),
        make_request([5, 6] * 4, 12, handle=4, temperature=0.9, allowed_token_ids=[5, 6], n=2),
        make_request([9] * 5, 12, handle=6, temperature=0.0, bad_words=[]),
        make_beam_request([7, 8, 9], BeamSearchParams(beam_width=2, max_tokens=4), handle=7),
    ]


def serve(
    device: Runner, drafts: int, added: list[AddRequest], depth: int = 2, num_blocks: int = 20
) -> Engine:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=16,
        max_num_seqs=5,
        budget=24,
        max_model_len=48,
        speculative=speculative(drafts) if drafts else None,
    )
    engine = Engine(scheduler, runner=device, depth=depth)
    for request in added:
        scheduler.add(request)
    with standing_in() if isinstance(device, GpuRunner) else nullcontext():
        engine.run()
    return engine


def told(engine: Engine) -> dict[int, Any]:
    beams = [unpack_ids(b.token_ids).tolist() for b in engine.finished[7].beams]
    return {**engine.tokens, -1: beams, -2: dict(engine.logprobs)}


def serve_guessed(
    runner: GpuRunner, drafts: int, added: list[AddRequest], expected: Engine, **options: Any
) -> Engine:
    """Serve with drafts of which most are right."""
    with guessing(runner, texts(added, expected.tokens), 0.8):
        return serve(runner, drafts, added, **options)


def test_tokens_are_the_same_with_drafts(drafting: tuple[GpuRunner, int], model: str) -> None:
    runner, drafts = drafting
    expected = serve(make_runner(model), 0, requests())
    engine = serve_guessed(runner, drafts, requests(), expected)
    assert told(engine) == told(expected)
    stats = engine.scheduler.stats()
    accepted, verified = (stats[f"spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))
    assert 0.5 * verified < accepted < verified
    assert {step.num_drafts for step in engine.steps} >= {0, drafts}
    assert len(engine.steps) < len(expected.steps)


@FOUR
def test_looked_up_drafts_change_no_tokens(drafting: tuple[GpuRunner, int], model: str) -> None:
    runner, drafts = drafting
    added = [
        make_request([9, 8] * 5, 14, handle=i, temperature=0.5 * i, allowed_token_ids=allowed)
        for i, allowed in enumerate((None, [4, 5]))
    ]
    expected = serve(make_runner(model), 0, added)
    engine = serve(runner, drafts, added)
    assert engine.tokens == expected.tokens
    assert engine.scheduler.stats()["spec_decode_num_draft_tokens"] > 0


@FOUR
def test_preempted_requests_go_on_with_the_same_tokens(
    drafting: tuple[GpuRunner, int], model: str
) -> None:
    runner, drafts = drafting
    added = [r for r in requests() if r.beam_search is None]
    expected = serve(make_runner(model), 0, added)
    engine = serve_guessed(runner, drafts, added, expected, num_blocks=6)
    assert engine.tokens == expected.tokens
    assert any(end.num_preemptions for end in engine.finished.values()), "blocks did for all"


@FOUR
def test_stop_tokens_wait_for_the_fewest_outputs_at_each_draft(
    drafting: tuple[GpuRunner, int], model: str
) -> None:
    """Requests stop at any token of a row, but not too early."""
    runner, drafts = drafting
    free = serve(make_runner(model), 0, [make_request([9] * 6, 9, temperature=0.0)]).tokens[0]
    added = [
        make_request(
            [9] * 6,
            14,
            temperature=0.0,
            min_tokens=fewest,
            stop_token_ids=free,
            presence_penalty=0.01 * (handle % 2),
            handle=handle,
        )
        for handle, fewest in enumerate((3, 4, 5, 6))
    ]
    expected = serve(make_runner(model), 0, added)
    assert serve_guessed(runner, drafts, added, expected).tokens == expected.tokens
    assert {len(tokens) for tokens in expected.tokens.values()} != {14}


def test_a_backend_that_needs_lengths_on_the_host_is_refused(model: str) -> None:
    args = worker_args(model, drafts=2)
    parallel = replace(args.parallel, attention_backend="torch")
    with standing_in(), pytest.raises(EngineStartError, match="attention_backend"):
        GpuRunner(replace(args, parallel=parallel))


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)])
def test_ranks_give_the_tokens_of_one_without_drafts(
    size: int, stages: int, tmp_path: Path
) -> None:
    """Cover ranks that share layers, and pipeline stages (tests/triton/sums/gpu_ranks.py)."""
    model = write_model("llama-gqa", tmp_path, num_hidden_layers=stages)
    got, expected = json.loads(
        run_interpreted("tests.triton.sums.gpu_ranks", model, str(size), str(stages), "2")
    )
    # Each request has sampled five times.
    counts = [len(tokens) for tokens in got[0]]
    assert got == [[all_[:n] for all_, n in zip(expected, counts, strict=True)]] * size
    assert min(counts) >= 5 and max(counts) >= 7


def test_a_method_that_a_gpu_does_not_have_is_refused(model: str) -> None:
    args = worker_args(model)
    scheduler = replace(args.scheduler, speculative_config={"method": "synthetic"})
    with standing_in(), pytest.raises(EngineStartError, match="'synthetic' does not run on a GPU"):
        GpuRunner(replace(args, scheduler=scheduler))


@FOUR
def test_rows_with_masks_verify_the_drafts_that_have_masks(
    drafting: tuple[GpuRunner, int], model: str
) -> None:
    """Compare steps with masks behind drafts, in the step's own logits and in copies."""
    runner, drafts = drafting
    controls = [Controls(has_grammar=True), Controls(has_grammar=True, logprobs=1)]
    held = {i: Request([3, 1, 4], 20, controls=c) for i, c in enumerate(controls)}
    begin = make_step([(0, 3, [0]), (1, 3, [1])], held, 0)
    begin.awaits_masks = 1
    begin.entering["max_drafts"] = drafts

    def masks(step_id: int, first_new: int, allowed: list[list[int]], **more: Any) -> StepMasks:
        sizes = np.array([len(allowed) // 2] * 2, np.int32)
        return StepMasks(
            step_id,
            first_new,
            np.array([0, 1], np.int32),
            np.arange(first_new, first_new + len(allowed), dtype=np.int32),
            words_of(allowed),
            sizes,
            **more,
        )

    def forced(*tokens: list[int]) -> dict[str, Any]:
        return {
            "forced_sizes": np.array([len(each) for each in tokens], np.int32),
            "forced_ids": np.array([t for each in tokens for t in each], np.int32),
        }

    def run(step: StepInput, given: StepMasks) -> StepOutput:
        with standing_in():
            return runner.execute(step, lambda: given).wait()

    # Both sample 7; only the first's forced tokens begin so, and it has the others as drafts.
    first = run(begin, masks(0, 0, [[7], [7]], **forced([7, 8, 9, 10], [6, 8])))
    assert first.token_ids.tolist() == [7, 7]
    assert next(first.next_by_row()) == [8, 9, 10]
    # With masks behind two of its three drafts, it verifies two.
    step = make_step([(0, 1, []), (1, 1, [])], {}, 1)
    step.awaits_masks, step.num_drafts = 1, drafts
    second = run(step, masks(1, 2, [[8], [9], [10], [11], [12], [13]]))
    assert list(second.by_row()) == [[8, 9, 10], [11]]
    assert second.num_drafts.tolist() == [2, 0]
    assert second.num_unverified == 1 and second.num_unverified_right == 1
    columns = LogprobColumns.unpack(second.logprobs)
    assert (columns.keys.tolist(), columns.positions.tolist()) == ([1], [4])
