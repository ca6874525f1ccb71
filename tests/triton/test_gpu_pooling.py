"""The GPU's runner makes the same vectors of prompts as the CPU's for the same steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.runner.runner import Runner
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.params.pooling_params import PoolingType
from sidestep.ipc.transport.step import Float32, StepInput
from tests.e2e.models import random_prompts, write_model
from tests.e2e.pooling_models import write_classifier
from tests.triton.gpu_stand_in import standing_in, worker_args
from tests.triton.support import INTERPRETED
from tests.unit.executor.steps import Request, schedule
from tests.unit.executor.test_model_runner import VOCAB, make_runner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    # The padding is NaN (see standing_in), and numpy warns of it.
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]
PROMPTS = [*random_prompts(4, VOCAB, longest=20, seed=5), [7]]


def steps() -> list[StepInput]:
    """Return steps of at most 12 tokens, so that most prompts come in chunks."""
    return [step for step, _ in schedule([Request(prompt, 1) for prompt in PROMPTS], 12, 16)]


def vectors(runner: Runner) -> list[Float32]:
    return [runner.execute(step).wait().vectors for step in steps()]


@pytest.mark.parametrize(("kind", "head"), [("last", False), ("mean", True), ("cls", False)])
def test_vectors_equal_those_of_the_cpu(kind: PoolingType, head: bool, tmp_path: Path) -> None:
    write = write_classifier if head else write_model
    path = write("llama-gqa", tmp_path, *[3] * head, num_hidden_layers=2)
    spec = load_model_spec(path, runner="pooling", pooler={"pooling_type": kind})
    expected = vectors(make_runner(path, spec=spec))
    with standing_in():
        runner = GpuRunner(dataclasses.replace(worker_args(path), spec=spec))
        got = vectors(runner)
    width = 3 if head else spec.hidden_size
    assert sum(map(len, expected)) == len(PROMPTS) * width
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
