"""New weights for engines on the CPU: all of them or none, also with requests running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep import LLM, AsyncLLM, EngineArgs, SamplingParams, ValidationError, WorkerCallError
from tests.e2e.conftest import write_tokenizer
from tests.e2e.engines import Engines
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model
from tests.waiting import until_stats

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(6, 331)
Change = Callable[[dict[str, Tensor]], object]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def expected_of(path: str) -> list[list[int]]:
    return reference_tokens(load_reference(path), PROMPTS, [12] * len(PROMPTS))


def changed(path: str, folder: Path, change: Change) -> str:
    """Write a folder with weights alone, and return it."""
    folder.mkdir()
    weights = load_file(Path(path) / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the folders of two models that differ in their weights alone."""
    first = write_model("llama-gqa", write_tokenizer(tmp_path_factory.mktemp("first")))
    other = tmp_path_factory.mktemp("other")
    write_model("llama-gqa", write_tokenizer(other))
    weights = load_file(other / "model.safetensors")
    mixed = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
    yield first, str(other)


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_outputs_are_those_of_the_weights_in_use(
    options: dict[str, int], models: tuple[str, str], engines: Engines
) -> None:
    first, other = models
    llm, before, after = engines.get(first, **options), expected_of(first), expected_of(other)
    assert before != after
    for path, expected in ((other, after), (first, before), (other, after)):
        llm.update_weights(path)
        assert tokens_of(llm) == expected
    llm.sleep(2)
    llm.wake_up()
    assert tokens_of(llm) == after, "a deep sleep reads the weights that were in use"
    llm.update_weights(first)
    assert tokens_of(llm) == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(331, 47)}),
            r"lm_head.weight has shape \[331, 47\]",
        ),
        (lambda w: w.update({"more": torch.zeros(1)}), "the checkpoint has more, which"),
    ],
    ids=["missing", "another shape", "too many"],
)
def test_weights_that_do_not_fit_change_nothing(
    change: Change, problem: str, models: tuple[str, str], engines: Engines, tmp_path: Path
) -> None:
    llm = engines.get(models[0], tensor_parallel_size=2)
    wrong = changed(models[1], tmp_path / "wrong", change)
    with pytest.raises(WorkerCallError, match=f"prepare_weights: model: {problem}"):
        llm.update_weights(wrong)
    assert tokens_of(llm) == expected_of(models[0])


def test_weights_that_fit_one_rank_alone_are_used_by_none(
    models: tuple[str, str], engines: Engines, tmp_path: Path
) -> None:
    """The last stage alone needs the last norm."""
    llm = engines.get(models[0], pipeline_parallel_size=2)
    wrong = changed(models[1], tmp_path / "wrong", lambda w: w.pop("model.norm.weight"))
    with pytest.raises(WorkerCallError, match="worker 1 .*: prepare_weights: .* lacks model.norm"):
        llm.update_weights(wrong)
    assert tokens_of(llm) == expected_of(models[0])


def test_a_folder_of_another_model_is_refused_by_its_config(
    models: tuple[str, str], engines: Engines, tmp_path: Path
) -> None:
    llm = engines.get(models[0])
    config = json.loads((Path(models[1]) / "config.json").read_text())
    wrong = Path(changed(models[1], tmp_path / "wrong", lambda w: None))
    (wrong / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ValidationError, match="^path: .* has norm.eps 0.5, not 1e-06"):
        llm.update_weights(str(wrong))
    with pytest.raises(ValidationError, match="^path: .* is not a folder"):
        llm.update_weights(str(tmp_path / "nowhere"))
    assert tokens_of(llm) == expected_of(models[0])


async def test_requests_go_on_while_the_weights_change_and_find_no_old_prefix(
    models: tuple[str, str],
) -> None:
    first, other = models
    args = EngineArgs(model=first, device="cpu", dtype="float32", cpu_threads=1)
    prompt = PROMPTS[3] * 3

    async def run(llm: AsyncLLM, count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        async for out in llm.generate(prompt, params):
            pass
        return list(out.outputs[0].token_ids)

    async with AsyncLLM.from_engine_args(args) as llm:
        running = asyncio.create_task(run(llm, 200))
        await until_stats(llm, num_running=1)
        await llm.update_weights(other)
        assert not running.done(), "the request is too short to show anything"
        (expected,) = reference_tokens(load_reference(other), [prompt], [12])
        assert await run(llm, 12) == expected
        assert len(await running) == 200
        assert await run(llm, 12) == expected


async def test_a_cancelled_update_changes_nothing_or_all(models: tuple[str, str]) -> None:
    first, other = models
    args = EngineArgs(model=first, device="cpu", dtype="float32", cpu_threads=1)
    async with AsyncLLM.from_engine_args(args) as llm:
        update = asyncio.create_task(llm.update_weights(other))
        await asyncio.sleep(0)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        async for out in llm.generate(PROMPTS[0], GREEDY):
            pass
        assert list(out.outputs[0].token_ids) == expected_of(first)[0]
        await llm.update_weights(other)
        async for out in llm.generate(PROMPTS[0], GREEDY):
            pass
        assert list(out.outputs[0].token_ids) == expected_of(other)[0]


def test_a_replica_that_is_started_again_has_the_weights_in_use(models: tuple[str, str]) -> None:
    first, other = models
    with LLM(model=first, device="cpu") as llm:
        llm.update_weights(other)
        for _ in range(2):
            old = psutil.Process(llm.pids["core"])
            old.kill()
            assert tokens_of(llm) == expected_of(other)
            old.wait(60)
            assert llm.pids["core"] != old.pid
