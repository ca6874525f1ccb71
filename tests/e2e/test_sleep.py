"""Sleep of engines on the CPU: memory is freed, and outputs are the same afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sidestep import LLM, SamplingParams, SidestepError, WorkerCallError
from tests.e2e.engines import Engines
from tests.e2e.models import RandomModel, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(random_prompts(6, 331), GREEDY, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outputs]


@pytest.mark.parametrize(
    "options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str
)
def test_outputs_after_a_sleep_are_those_before_it(
    options: dict[str, int], random_model: RandomModel, engines: Engines
) -> None:
    path, _ = random_model("llama-gqa")
    llm = engines.get(path, **options)
    before = tokens_of(llm)
    for level in (1, 2, 1):
        llm.sleep(level)
        assert llm.is_sleeping()
        with pytest.raises(SidestepError, match="the engine sleeps"):
            tokens_of(llm)
        with pytest.raises(WorkerCallError, match="the engine sleeps at level .; wake it up first"):
            llm.update_weights(path)
        llm.wake_up()
        assert tokens_of(llm) == before


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=str)
def test_each_rank_tells_the_memory_that_it_holds_awake_and_asleep(
    options: dict[str, int], random_model: RandomModel, engines: Engines
) -> None:
    path, reference = random_model("llama-gqa")
    llm = engines.get(path, **options)
    ranks = options.get("tensor_parallel_size", 1)
    awake = llm.get_memory_use()
    assert [(use["replica"], use["rank"]) for use in awake] == [(0, rank) for rank in range(ranks)]
    assert all(use["resident"] > use["weights"] for use in awake)
    assert all(use["kv_cache"] == awake[0]["kv_cache"] > 0 for use in awake)
    # The ranks share all but the norms, and the vocabulary is padded.
    whole = sum(weight.nbytes for weight in reference.parameters())
    assert whole <= sum(use["weights"] for use in awake) < whole * 1.1
    for level in (1, 2):
        llm.sleep(level)
        for use, before in zip(llm.get_memory_use(), awake, strict=True):
            assert use["kv_cache"] == 0
            assert use["weights"] == (before["weights"] if level == 1 else 0)
        llm.wake_up()
    for use, before in zip(llm.get_memory_use(), awake, strict=True):
        assert use | {"resident": 0} == before | {"resident": 0}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_sleep_gives_memory_back_to_the_system(engines: Engines) -> None:
    """The bundled model's weights take 6 MB; the blocks of its cache that were written, more."""
    llm = engines.get(num_kv_blocks=4096)
    prompts = [[1 + (i * 7 + j) % 250 for j in range(500)] for i in range(60)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    pid = llm.pids["worker_0"]
    awake = resident_bytes(pid)
    llm.sleep(1)
    lightly = resident_bytes(pid)
    llm.wake_up()
    llm.sleep(2)
    deeply = resident_bytes(pid)
    llm.wake_up()
    assert lightly < awake - (10 << 20) and deeply < lightly


def test_an_engine_that_cannot_read_its_weights_sleeps_on_until_it_can(
    random_model: RandomModel, tmp_path: Path
) -> None:
    path, _ = random_model("llama-gqa")
    folder = shutil.copytree(path, tmp_path / "model")
    with LLM(str(folder), device="cpu", dtype="float32", cpu_threads=1) as llm:
        before = tokens_of(llm)
        llm.sleep(2)
        (folder / "model.safetensors").rename(folder / "away")
        with pytest.raises(
            WorkerCallError, match="wake_up: .* no safetensors nor pytorch_model.bin files"
        ):
            llm.wake_up()
        assert llm.is_sleeping()
        (folder / "away").rename(folder / "model.safetensors")
        llm.wake_up()
        assert tokens_of(llm) == before
