"""Steps that are played from tapes: the same bits as kernels that are launched one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.executor.attention.native_backend import NativeAttention
from sidestep.executor.cpu.cpu_runner import ModelRunner
from sidestep.executor.cpu.step_tapes import MOST_TOKENS, StepTapes
from sidestep.executor.layers import cpu_product
from sidestep.executor.layers.layouts import native_layouts
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.runner.sleep import SleepCalls
from sidestep.ipc.config_sections import ParallelConfig
from sidestep.ipc.transport.worker_calls import Sleep, WakeUp
from sidestep.kernels.ops.rms_norm import Stream
from tests.e2e.models import random_prompts, write_model
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

PLAYED = [
    "llama-biases",
    "qwen2",
    "qwen3-tied",
    "gemma2",
    "gemma3",
    "glm4",
    "granite-tied",
    "phi3-window",
    "mixtral",
    "qwen3-moe",
    "glm4-moe",
    "gpt-oss",
    "olmoe",
    "olmo2",
    "qwen2-moe",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "gemma4",
    "gemma4-moe",
    "gemma4-token-inputs",
    "gemma4-unified",
]
"""Families whose layers have no operation of torch."""
LAUNCHED = {"ministral3": "aten::mul_"}
"""Families with an operation of torch, which is named."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if (reason := NativeAttention.missing(torch.device("cpu"))) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(cpu_product, "_chosen", {})
    monkeypatch.setattr(native_layouts, "_FEWEST_NUMBERS", 1)


def requests() -> list[Request]:
    """Return requests of different lengths, so that steps have many numbers of tokens."""
    prompts = random_prompts(9, 257, longest=40)
    return [Request(prompt, 3 + 5 * i) for i, prompt in enumerate(prompts)]


def watched(runner: ModelRunner) -> list[Tensor]:
    """Return a list to which each step's stream behind the last layer will be added."""
    seen: list[Tensor] = []
    states = runner._model.states

    def noted(inputs: Tensor, batch: HostBatch, rows: Tensor | None) -> Stream:
        made = states(inputs, batch, rows)
        seen.append(made.hidden.clone())
        return made

    runner._model.states = noted  # type: ignore[method-assign]
    return seen


def tapes_of(runner: ModelRunner) -> StepTapes:
    tapes = runner._model._tapes
    assert tapes is not None
    return tapes


def eager(path: str) -> ModelRunner:
    runner = make_runner(path, parallel=ParallelConfig(device="cpu", enforce_eager=True))
    assert runner._model._tapes is None
    return runner


def equal(played: Sequence[Tensor], launched: Sequence[Tensor]) -> None:
    assert len(played) == len(launched)
    for own, other in zip(played, launched, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("family", PLAYED)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_played_step_has_the_bits_of_launched_kernels(
    family: str, threads: int, tmp_path: Path
) -> None:
    path, before = write_model(family, tmp_path), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        played, launched = make_runner(path), eager(path)
        seen, expected = watched(played), watched(launched)
        # In the second turn all tapes are there, and prompts come between steps that are played.
        for _ in range(2):
            assert run(played, requests(), 64) == run(launched, requests(), 64)
    finally:
        torch.set_num_threads(before)
    equal(seen, expected)
    assert tapes_of(played).refused is None and len(tapes_of(played)._by_tokens) >= 8


@pytest.mark.parametrize("family", LAUNCHED)
def test_layers_with_an_operation_of_torch_are_launched(family: str, tmp_path: Path) -> None:
    path = write_model(family, tmp_path)
    runner, launched = make_runner(path), eager(path)
    seen, expected = watched(runner), watched(launched)
    assert run(runner, requests(), 64) == run(launched, requests(), 64)
    equal(seen, expected)
    assert tapes_of(runner).refused == LAUNCHED[family]


def test_large_steps_have_no_tapes(tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path))
    prompt = np.arange(MOST_TOKENS + 1) % 257
    run(runner, [Request(prompt.tolist(), 1), Request(prompt[1:].tolist(), 1)], 3 * MOST_TOKENS)
    assert not tapes_of(runner)._by_tokens


@pytest.mark.parametrize("level", [1, 2])
def test_tapes_are_recorded_anew_after_a_sleep(level: int, tmp_path: Path) -> None:
    runner = make_runner(write_model("llama-gqa", tmp_path))
    expected, old = run(runner, requests(), 64), tapes_of(runner)
    sleep = next(calls for calls in runner.calls if isinstance(calls, SleepCalls))
    sleep.sleep(Sleep(level=level))
    assert runner._model._tapes is None
    sleep.wake_up(WakeUp())
    assert run(runner, requests(), 64) == expected
    assert tapes_of(runner) is not old and tapes_of(runner)._by_tokens


def test_new_weights_have_new_tapes(tmp_path: Path) -> None:
    first, second = (
        write_model("llama-gqa", tmp_path / "a"),
        write_model("llama-gqa", tmp_path / "b"),
    )
    file = Path(second) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.down_proj.weight"].neg_()
    save_file(weights, file, {"format": "pt"})
    runner, other = make_runner(first), make_runner(second)
    assert run(runner, requests(), 64) != (expected := run(other, requests(), 64))
    args = other._model._args
    runner._model.use_weights(runner._model.read_weights(args), args)
    assert run(runner, requests(), 64) == expected
