"""The GPU's runner gives the same tokens as the CPU's for the same steps.

Its kernels run in Triton's interpreter, and all other code is its own (see gpu_stand_in.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sidestep.executor.attention.halves import Halves
from sidestep.executor.attention.triton_backend import TritonAttention
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.models.decoder import Layer
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.runner.runner import PendingOutput, Runner
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.params.logits_controls import Controls
from sidestep.ipc.transport.messages import unpack_ids
from sidestep.ipc.transport.step import LogprobColumns, StepInput, StepOutput, UInt8
from sidestep.kernels.attention.decode_scratch import DecodeScratch
from sidestep.kernels.ops.rms_norm import Stream
from sidestep.kernels.processor_parts import ProcessorPart
from tests.e2e.models import random_prompts, write_model
from tests.fakes import Engine, make_beam_request, make_request, make_scheduler
from tests.triton.gpu_stand_in import mixed_requests, standing_in, worker_args
from tests.triton.support import INTERPRETED, run_interpreted
from tests.unit.executor.sampling.test_grammar_masks import run_held
from tests.unit.executor.steps import Request, make_step, schedule, windows_of
from tests.unit.executor.test_gpt_oss import write_packed
from tests.unit.executor.test_model_runner import VOCAB, make_runner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    # The padding is NaN (see standing_in), and numpy warns of it.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


MIXED = ["linear_attention", "full_attention"]
"""Layers of a model of which one is recurrent."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small model of two layers: the interpreter takes its time."""
    return write_model("llama-gqa", tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def runner(model: str, one_thread: None) -> GpuRunner:
    """Return a runner that is loaded once, has run the largest step and captured graphs."""
    with standing_in():
        made = GpuRunner(worker_args(model))
    return made


def outputs(runner: Runner, steps: Sequence[StepInput], depth: int = 2) -> list[StepOutput]:
    """Return the outputs with the given number of steps in flight."""
    flying: list[PendingOutput] = []
    found = []
    for step in steps:
        flying.append(runner.execute(step))
        if len(flying) == depth:
            found.append(flying.pop(0).wait())
    return found + [pending.wait() for pending in flying]


def compare(runner: GpuRunner, model: str, steps: Sequence[StepInput]) -> None:
    """Check that the runner's outputs equal the CPU's and are not empty."""
    expected = outputs(make_runner(model), steps)
    with standing_in():
        got = outputs(runner, steps)
    assert sum(len(output.token_ids) for output in expected) >= len(steps)
    for ours, theirs in zip(got, expected, strict=True):
        assert (
            ours.step_id == theirs.step_id and ours.token_ids.tolist() == theirs.token_ids.tolist()
        )
        assert ours.start_ns <= ours.end_ns
        compare_logprobs(ours.logprobs, theirs.logprobs)
        compare_logprobs(ours.prompt_logprobs, theirs.prompt_logprobs)


def compare_logprobs(ours: UInt8 | bytes, theirs: UInt8 | bytes) -> None:
    assert bool(len(ours)) == bool(len(theirs))
    if len(ours):
        a, b = LogprobColumns.unpack(ours), LogprobColumns.unpack(theirs)
        for name in ("keys", "positions", "sizes", "ranks", "token_ids"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist(), name
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.parametrize("eager", [False, True])
def test_steps_give_what_they_give_on_a_cpu(
    eager: bool, runner: GpuRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run chunks of prompts, decodes and both, captured or not, with two steps in flight."""
    assert runner._model.graphs is not None
    if eager:
        monkeypatch.setattr(runner._model, "graphs", None)
    compare(runner, model, [step for step, _ in schedule(mixed_requests(), 12, 16)])


def test_steps_in_halves_give_what_whole_ones_do(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute decodes of four rows and more in halves, from some context on, captured or not."""
    part, ran = ProcessorPart(1, None), []
    through = Halves.through

    def recorded(self: Halves, *operands: Any) -> Stream:
        ran.append(True)
        return through(self, *operands)

    for of, name, value in (
        (Halves, "through", recorded),
        (Layer, "may_split", True),
        (TritonAttention, "_parts_of_device", lambda _: (part, part)),
        (TritonAttention, "split_context", lambda _, rows: range(60, 999) if rows >= 4 else None),
        (DecodeScratch, "on", lambda self, _: self),
    ):
        monkeypatch.setattr(of, name, value)
    with standing_in():
        runner = GpuRunner(worker_args(model))
    requests = [Request(list(range(7 * i, 9 * i + 2)), 15) for i in range(5)]
    steps = [step for step, _ in schedule(requests, 12, 16)]
    for graphs in (runner._model.graphs, None):
        runner._model.graphs = graphs
        ran.clear()
        compare(runner, model, steps)
        several = [step for step in steps if len(step.slots) >= 4 and (step.num_tokens == 1).all()]
        assert 1 <= len(ran) < len(several), "others have too little context"


@pytest.mark.parametrize(
    "family",
    ["gemma2", "gemma3", "gemma4-moe", "gemma4-token-inputs", "ministral3", "olmo3", "qwen3-moe"]
    + ["qwen3.5"],
)
def test_families_whose_layers_differ_from_llamas(family: str, tmp_path: Path) -> None:
    """Cover norms around products, windows with another rope, GELU, bounded scores and experts.

    Cover heads of two shapes, and layers that read the keys of others, too.
    """
    changes: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
    if family == "qwen3-moe":
        changes = {"mlp_only_layers": [0]}
    elif family == "qwen3.5":
        changes = {"layer_types": MIXED}
    elif family == "gemma4-token-inputs":
        changes = {
            "layer_types": changes["layer_types"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
        }
    path = write_model(family, tmp_path, **{"num_hidden_layers": 2, **changes})
    with standing_in():
        made = GpuRunner(worker_args(path))
    steps = [step for step, _ in schedule(mixed_requests()[:3], 12, 16, windows_of(made))]
    compare(made, path, steps)


def test_experts_of_gpt_oss_stay_packed(tmp_path: Path) -> None:
    """Cover sinks too."""
    kinds = ["sliding_attention", "full_attention"]
    _, path = write_packed(tmp_path, num_hidden_layers=2, layer_types=kinds)
    with standing_in():
        made = GpuRunner(worker_args(path))
    assert made._model._loaded is not None
    weights = weights_of(made._model._loaded.decoder).values()
    assert {tensor.dtype for tensor in weights} == {torch.float32, torch.int32}
    compare(made, path, [step for step, _ in schedule(mixed_requests()[:3], 12, 16)])


def test_a_copied_block_and_another_token_than_the_sampled_one(
    runner: GpuRunner, model: str
) -> None:
    """Copy blocks as beams do.

    Row 1 enters with a copy of row 0's computed tokens, and each goes on with a token of its own.
    """
    parent, child = Request(range(1, 21), 3), Request([9], 3)
    begin, go_on = make_step([(0, 12, [0])], {0: parent}, 0), make_step([(0, 8, [1])], {}, 1)
    fork = make_step([(0, 1, []), (1, 1, [0, 2])], {1: child}, 2)
    lengths = {"num_known": 21, "num_prompt": 20, "num_computed": 20, "max_total": 23}
    for name, value in lengths.items():
        fork.entering[name] = value
    fork.copy_sources, fork.copy_targets = np.array([1], np.int32), np.array([2], np.int32)
    fork.forced_slots, fork.forced_tokens = np.array([0], np.int32), np.array([4], np.int32)
    compare(runner, model, [begin, go_on, fork, make_step([(0, 1, []), (1, 1, [])], {}, 3)])


def test_rows_with_a_grammar_sample_what_they_sample_on_a_cpu(
    runner: GpuRunner, model: str
) -> None:
    """Sample rows with a grammar alone in the step's own logits, with other controls in a copy."""

    def requests() -> list[Request]:
        controls = [
            Controls(),
            Controls(has_grammar=True),
            Controls(has_grammar=True, logprobs=1),
            Controls(has_grammar=True),
            Controls(logit_bias={3: 30.0}),
        ]
        return [
            Request(prompt, 3, temperature=[0.0, 0.9][i % 2], seed=i, controls=controls[i])
            for i, prompt in enumerate(random_prompts(5, VOCAB, longest=9, seed=6))
        ]

    expected, got = requests(), requests()
    told = run_held(make_runner(model), expected, budget=12)
    with standing_in():
        found = run_held(runner, got, budget=12)
    assert [r.output for r in got] == [r.output for r in expected]
    for ours, theirs in zip(found, told, strict=True):
        compare_logprobs(ours, theirs)


def test_a_scheduler_s_steps_give_what_they_give_on_a_cpu(runner: GpuRunner, model: str) -> None:
    """Run with too few blocks for all requests.

    Choices of one prompt and a beam search are among them.
    """

    def serve(device: Runner) -> dict[int, list[int]]:
        scheduler = make_scheduler(
            num_blocks=6, block_size=16, max_num_seqs=5, budget=12, max_model_len=48
        )
        engine = Engine(scheduler, runner=device)
        for i, prompt in enumerate(random_prompts(2, VOCAB, longest=14, seed=8)):
            scheduler.add(
                make_request(prompt, 9, handle=i, temperature=0.8 * i, presence_penalty=0.5 * i)
            )
        scheduler.add(make_request(list(range(18)), 5, handle=2, n=2, temperature=1.0, logprobs=1))
        scheduler.add(
            make_beam_request([7, 8, 9], BeamSearchParams(beam_width=2, max_tokens=4), handle=4)
        )
        engine.run()
        assert any(end.num_preemptions for end in engine.finished.values()), "blocks did for all"
        assert any(len(step.copy_sources) for step in engine.steps)
        beams = engine.finished[4].beams
        assert len(engine.finished) == 5 and len(beams) == 2
        return engine.tokens | {
            5 + i: unpack_ids(beam.token_ids).tolist() for i, beam in enumerate(beams)
        }

    expected = serve(make_runner(model))
    with standing_in():
        assert serve(runner) == expected


@pytest.mark.parametrize(
    ("family", "size", "stages"),
    [
        ("llama-gqa", 2, 1),
        ("llama-gqa", 1, 3),
        ("qwen3-moe-every-second-layer", 2, 1),
        ("qwen3.5", 2, 1),
        ("qwen3.5", 1, 2),
    ],
)
def test_ranks_give_what_one_gives_on_a_cpu(
    family: str, size: int, stages: int, tmp_path: Path
) -> None:
    """Cover ranks that share layers, ranks with whole experts, and pipeline stages.

    See tests/triton/sums/gpu_ranks.py.
    """
    changes = {"layer_types": MIXED} if family == "qwen3.5" else {}
    model = write_model(family, tmp_path, num_hidden_layers=max(2, stages), **changes)
    got, expected = json.loads(
        run_interpreted("tests.triton.sums.gpu_ranks", model, str(size), str(stages), "0")
    )
    assert got == [expected] * size
    assert sum(map(len, expected)) == 6 * stages
