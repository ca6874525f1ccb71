"""Sleep and new weights of the GPU's runner, with kernels in Triton's interpreter.

Whether the device's memory is really free in a sleep is asked in tests/gpu.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep.executor.gpu.gpu_runner import GpuRunner
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.weight_memory import weights_of
from sidestep.executor.runner.runner import Runner
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.transport.worker_calls import (
    AnyCall,
    ApplyWeights,
    CallResult,
    DropWeights,
    MemoryUse,
    PrepareWeights,
    SentCall,
    Sleep,
    WakeUp,
)
from tests.e2e.models import write_model
from tests.triton.gpu_stand_in import MEMORY, mixed_requests, standing_in, worker_args
from tests.triton.support import INTERPRETED
from tests.unit.executor.steps import schedule
from tests.unit.executor.test_model_runner import make_runner

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not INTERPRETED, reason="with a GPU, tests/gpu has the runner itself"),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|divide by zero) encountered in:RuntimeWarning"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return two models that differ in their weights; the head is the embedding."""
    first, other = (tmp_path_factory.mktemp(name) for name in ("first", "other"))
    for folder in (first, other):
        write_model("llama-mha-tied", folder, num_hidden_layers=1)
    weights = load_file(other / "model.safetensors")
    mixed = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
    return str(first), str(other)


@pytest.fixture
def runner(models: tuple[str, str], one_thread: None) -> Iterator[GpuRunner]:
    with standing_in():
        made = GpuRunner(worker_args(models[0]))
        yield made


@pytest.fixture
def dummy(models: tuple[str, str], one_thread: None) -> Iterator[GpuRunner]:
    """Yield a runner with weights in memory that can be freed.

    On a GPU all can be; on the CPU those cannot that lie in the memory of a safetensors file.
    """
    args = worker_args(models[0])
    with standing_in():
        made = GpuRunner(
            dataclasses.replace(args, model=dataclasses.replace(args.model, load_format="dummy"))
        )
        yield made


def call(runner: Runner, asked: AnyCall) -> CallResult:
    """Return the result of a call, or raise CallRefusedError."""
    answer = runner.answer(SentCall(number=0, call=asked))
    if answer.error is not None:
        raise CallRefusedError(answer.error)
    return answer.result


def decoder_of(runner: GpuRunner) -> DecoderForCausalLM:
    assert runner._model.kernels is not None
    return runner._model.kernels.model.decoder


def tokens_of(runner: Runner) -> list[list[int]]:
    """Return the tokens of each step of some requests."""
    steps = schedule(mixed_requests()[:3], 12, 16)
    return [runner.execute(step).wait().token_ids.tolist() for step, _ in steps]


def expected_of(path: str) -> list[list[int]]:
    return tokens_of(make_runner(path))


@pytest.mark.parametrize("level", [1, 2])
def test_a_runner_gives_the_same_tokens_after_a_sleep(level: int, dummy: GpuRunner) -> None:
    runner, expected = dummy, tokens_of(dummy)
    graphs = runner._model.graphs
    weights = weights_of(decoder_of(runner))
    call(runner, Sleep(level=level))
    assert runner._model.kernels is None and runner._model.graphs is None
    if level == 1:
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in weights.values())
    else:
        assert runner._model._loaded is None
    assert call(runner, Sleep(level=level)) == {"freed_bytes": 0}
    call(runner, WakeUp())
    call(runner, WakeUp())
    assert runner._model.graphs is not None and runner._model.graphs is not graphs
    assert tokens_of(runner) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_a_runner_tells_the_memory_that_it_holds(level: int, dummy: GpuRunner) -> None:
    awake = call(dummy, MemoryUse())
    weights = {id(tensor): tensor for tensor in weights_of(decoder_of(dummy)).values()}
    assert awake["weights"] == sum(tensor.nbytes for tensor in weights.values()) > 0
    assert dummy._model.kernels is not None
    assert awake["kv_cache"] == dummy._model.kernels.attention.cache.nbytes > 0
    assert awake["free"] == awake["total"] == MEMORY
    assert awake["allocated"] == awake["reserved"] == 0
    call(dummy, Sleep(level=level))
    assert call(dummy, MemoryUse()) == {**awake, "weights": 0, "kv_cache": 0}
    call(dummy, WakeUp())
    assert call(dummy, MemoryUse()) == awake


def test_a_runner_sleeps_on_while_the_gpu_has_too_little_memory(
    dummy: GpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs what it has freed, and not what other programs have freed meanwhile."""
    runner, expected, gib = dummy, tokens_of(dummy), 1 << 30
    reserved, free = iter([9 * gib, gib]), iter([gib, 30 * gib])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 0))
    assert call(runner, Sleep(level=1)) == {"freed_bytes": 8 * gib}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 * gib, 0))
    with pytest.raises(CallRefusedError, match="7.0 GiB free of the 8.0 that the engine needs"):
        call(runner, WakeUp())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * gib, 0))
    call(runner, WakeUp())
    assert tokens_of(runner) == expected


def test_new_weights_are_written_at_the_addresses_of_the_old_ones(
    runner: GpuRunner, models: tuple[str, str]
) -> None:
    """The graphs, which keep addresses, are not captured again."""
    before = {path: tensor.data_ptr() for path, tensor in weights_of(decoder_of(runner)).items()}
    graphs = runner._model.graphs
    for folder in reversed(models):
        call(runner, PrepareWeights(folder=folder))
        call(runner, ApplyWeights(folder=folder))
        assert tokens_of(runner) == expected_of(folder)
    after = {path: tensor.data_ptr() for path, tensor in weights_of(decoder_of(runner)).items()}
    assert after == before and runner._model.graphs is graphs


def test_weights_that_were_dropped_or_are_of_another_folder_are_not_used(
    runner: GpuRunner, models: tuple[str, str]
) -> None:
    first, other = models
    call(runner, PrepareWeights(folder=other))
    with pytest.raises(CallRefusedError, match="have not been read"):
        call(runner, ApplyWeights(folder=first))
    call(runner, DropWeights())
    with pytest.raises(CallRefusedError, match="have not been read"):
        call(runner, ApplyWeights(folder=other))
    assert tokens_of(runner) == expected_of(first)


def test_a_head_of_its_own_does_not_take_the_place_of_a_tied_one(
    runner: GpuRunner, models: tuple[str, str], tmp_path: Path
) -> None:
    weights = load_file(Path(models[1]) / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(weights["model.embed_tokens.weight"].shape)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CallRefusedError, match="only one of the old and the new head"):
        call(runner, PrepareWeights(folder=str(tmp_path)))
    assert tokens_of(runner) == expected_of(models[0])
