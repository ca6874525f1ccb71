"""Experts that are quantized while they load give a CPU's tokens on a stand-in for a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import random_prompts, write_model
from tests.triton.gpu_stand_in import standing_in, worker_args
from tests.triton.support import INTERPRETED
from tests.triton.test_gpu_runner import outputs
from tests.unit.executor.steps import Request, schedule
from tests.unit.executor.test_model_runner import VOCAB

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


def test_tokens_of_four_bits_are_those_of_a_cpu(tmp_path: Path) -> None:
    """The shared expert has the others' width, so that it is one of them there."""
    model = write_model("qwen2-moe", tmp_path, shared_expert_intermediate_size=24)
    args = worker_args(model, enforce_eager=True)
    args = replace(args, spec=load_model_spec(model, quantization="int4"))
    on_cpu = replace(args, parallel=replace(args.parallel, attention_backend="torch"))
    prompts = random_prompts(2, VOCAB, longest=14, seed=5)
    requests = [Request(prompt, 3, temperature=0.0) for prompt in prompts]
    steps = [step for step, _ in schedule(requests, 12, 16)]
    expected = [output.token_ids.tolist() for output in outputs(ModelRunner(on_cpu), steps)]
    with standing_in():
        got = [output.token_ids.tolist() for output in outputs(GpuRunner(args), steps)]
    assert got == expected and sum(map(len, got)) >= 6
