"""Models whose weights are in pytorch_model.bin give the tokens of the same safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sidestep import DEFAULT_MODEL, LLM, EngineStartError, SamplingParams, WorkerCallError
from tests.e2e.engines import Engines

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["def get_name(", "class Stack:", "import "]


def tokens_of(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def converted(folder: Path, shards: int, head_sign: float = 1.0) -> str:
    """Write the bundled model with its weights in files of torch, and return its folder."""
    shutil.copytree(DEFAULT_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(Path(DEFAULT_MODEL) / "model.safetensors")
    weights["model.norm.weight"] *= head_sign
    if shards == 1:
        torch.save(weights, folder / "pytorch_model.bin")
        return str(folder)
    files = [f"pytorch_model-{i + 1:05}-of-{shards:05}.bin" for i in range(shards)]
    place = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        torch.save({n: w for n, w in weights.items() if place[n] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    return str(folder)


@pytest.fixture(scope="module")
def expected(engines: Engines) -> Iterator[list[list[int]]]:
    yield tokens_of(engines.get())


@pytest.mark.parametrize(("shards", "ranks"), [(1, 1), (3, 2)])
def test_tokens_are_those_of_the_safetensors(
    shards: int, ranks: int, tmp_path: Path, engines: Engines, expected: list[list[int]]
) -> None:
    path = converted(tmp_path / "model", shards)
    with LLM(path, device="cpu", dtype="float32", cpu_threads=1, tensor_parallel_size=ranks) as llm:
        assert tokens_of(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert tokens_of(llm) == expected


def test_new_weights_may_be_files_of_torch(
    tmp_path: Path, engines: Engines, expected: list[list[int]]
) -> None:
    llm = engines.get(tensor_parallel_size=2)
    llm.update_weights(converted(tmp_path / "other", 2, head_sign=-1.0))
    assert tokens_of(llm) != expected
    llm.update_weights(converted(tmp_path / "same", 1))
    assert tokens_of(llm) == expected
    (tmp_path / "same" / "pytorch_model.bin").write_bytes(b"broken")
    with pytest.raises(WorkerCallError, match=r"prepare_weights: model: .*bin cannot be read"):
        llm.update_weights(str(tmp_path / "same"))
    assert tokens_of(llm) == expected


def test_a_format_that_the_folder_lacks_is_refused(tmp_path: Path) -> None:
    path = converted(tmp_path / "model", 1)
    with pytest.raises(EngineStartError, match="has no safetensors files"):
        LLM(path, device="cpu", load_format="safetensors", cpu_threads=1)
