"""Calls to workers on GPUs: profiles with kernels, memory that sleep frees, and new weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep import LLM, SamplingParams
from sidestep.ipc.model.cache_sizes import GPU_BLOCK_SIZE
from sidestep.ipc.model.model_size import layers_size
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts(6, 331)
CACHE_BYTES = 4 << 30
RANKS = [
    1,
    pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")),
]


def engine(path: str, ranks: int = 1, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "num_kv_blocks": num_blocks(path, ranks), "max_num_seqs": 32}
    return LLM(path, tensor_parallel_size=ranks, **{**defaults, **options})


def num_blocks(path: str, ranks: int) -> int:
    """Return the blocks that take CACHE_BYTES on each rank, in float32."""
    spec = load_model_spec(path)
    token_bytes = layers_size(spec, ranks).kv_per_token * 4
    return CACHE_BYTES // (token_bytes * GPU_BLOCK_SIZE)


def reserved(llm: LLM) -> int:
    """Return the bytes that the workers hold, whatever else runs on the GPU."""
    return sum(use["reserved"] for use in llm.get_memory_use())


def tokens_of(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_sleep_frees_the_device_and_outputs_are_the_same_afterwards(
    ranks: int, eager: bool, model_folder: Path
) -> None:
    path = write_model("llama-gqa", model_folder)
    with engine(path, ranks, enforce_eager=eager) as llm:
        before, awake = tokens_of(llm), reserved(llm)
        for level in (1, 2, 1):
            llm.sleep(level)
            assert awake - reserved(llm) > ranks * CACHE_BYTES * 0.9
            assert all(use["weights"] == use["kv_cache"] == 0 for use in llm.get_memory_use())
            llm.wake_up()
            assert tokens_of(llm) == before


def test_a_sleep_frees_the_weights_too(model_folder: Path) -> None:
    path = write_model(
        "llama-gqa",
        model_folder,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
    )
    weights = (Path(path) / "model.safetensors").stat().st_size
    with engine(path, num_kv_blocks=64, max_num_batched_tokens=256) as llm:
        before, awake = tokens_of(llm), reserved(llm)
        for level in (1, 2):
            llm.sleep(level)
            assert awake - reserved(llm) > weights * 0.9
            assert llm.get_memory_use()[0]["weights"] == 0
            llm.wake_up()
            assert tokens_of(llm) == before


@pytest.mark.parametrize("ranks", RANKS)
def test_a_profile_has_the_kernels_of_graphs(
    ranks: int, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with engine(write_model("llama-gqa", model_folder), ranks) as llm:
        llm.start_profile(str(tmp_path_factory.mktemp("profile")))
        tokens_of(llm)
        files = llm.stop_profile()
    assert len(files) == ranks
    for file in files:
        events = json.loads(Path(file).read_text())["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events)


@pytest.mark.parametrize("ranks", RANKS)
def test_outputs_are_those_of_the_weights_in_use(
    ranks: int, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = write_model("llama-gqa", model_folder)
    other = tmp_path_factory.mktemp("other")
    write_model("llama-gqa", other)
    weights = load_file(other / "model.safetensors")
    mixed = {name: weight.flip(0).contiguous() for name, weight in weights.items()}
    save_file(mixed, other / "model.safetensors", metadata={"format": "pt"})
    before, after = (
        reference_tokens(load_reference(path), PROMPTS, [12] * len(PROMPTS))
        for path in (first, str(other))
    )
    assert before != after
    with engine(first, ranks) as llm:
        for path, expected in ((str(other), after), (first, before), (str(other), after)):
            llm.update_weights(path)
            assert tokens_of(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert tokens_of(llm) == after
