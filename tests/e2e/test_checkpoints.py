"""Checkpoints that their config.json does not describe in full.

They are read as transformers reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep import LLM, AsyncLLM, EngineArgs, SamplingParams
from sidestep.executor.models.model_loading import EMBEDDING, HEAD, tie_as_found
from sidestep.executor.weights.weight_loader import SafetensorsWeights
from sidestep.ipc.model.layer_split import stage_of
from sidestep.ipc.model.model_spec import load_model_spec
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def tokens(path: str, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    with LLM(path, device="cpu", dtype="float32", cpu_threads=1, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_head_of_its_own_is_used_although_the_config_ties_it(model_folder: Path) -> None:
    path = write_model("llama-mha-tied", model_folder)
    change_weights(model_folder, lambda w: w.update({HEAD: torch.randn(w[EMBEDDING].shape)}))
    prompts = random_prompts(5, 331)
    expected = reference_tokens(load_reference(path), prompts, [12] * 5)
    assert tokens(path, prompts, tensor_parallel_size=2) == expected
    change_weights(model_folder, lambda w: w.pop(HEAD))
    assert reference_tokens(load_reference(path), prompts, [12] * 5) != expected, (
        "the head has made no difference"
    )


@pytest.mark.parametrize(
    ("change", "is_tied"),
    [
        (lambda w: w.update({HEAD: w[EMBEDDING].clone()}), True),
        (lambda w: w.update({HEAD: w.pop(EMBEDDING)}), True),
        (lambda w: w.update({HEAD: w[EMBEDDING] + (torch.arange(331) == 330)[:, None]}), False),
    ],
    ids=["equal", "alone", "other in the last row"],
)
def test_a_head_beside_the_embedding_is_compared_with_it(
    change: Callable[[dict[str, Tensor]], object], is_tied: bool, model_folder: Path
) -> None:
    path = write_model("llama-mha-tied", model_folder)
    embedding = load_file(model_folder / "model.safetensors")[EMBEDDING]
    change_weights(model_folder, change)
    with SafetensorsWeights(path, torch.float32, torch.device("cpu")) as weights:
        spec = tie_as_found(load_model_spec(path), weights, stage_of((3,), 0), tells=False)
        assert spec.tie_word_embeddings == is_tied
        assert torch.equal(weights.get(EMBEDDING, (331, 48)), embedding)
        weights.ignore("model.", *([] if is_tied else [HEAD]))
        weights.finish()


def test_yarn_by_an_override_equals_transformers_with_it_in_the_file(model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    prompts = random_prompts(5, 331)
    file = model_folder / "config.json"
    before = file.read_text()
    plain = reference_tokens(load_reference(path), prompts, [12] * 5)
    config = json.loads(before)
    config["rope_parameters"] = {**YARN, "rope_theta": config["rope_parameters"]["rope_theta"]}
    file.write_text(json.dumps(config))
    expected = reference_tokens(load_reference(path), prompts, [12] * 5)
    assert expected != plain
    file.write_text(before)
    assert tokens(path, prompts, hf_overrides={"rope_scaling": YARN}) == expected


async def test_a_long_context_is_fitted_to_a_small_cache_on_the_cpu(tmp_path: Path) -> None:
    """Qwen3-0.6B's 40,960 tokens take more than the cache that a CPU has by default."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "vocab_size": 331,
                "hidden_size": 64,
                "head_dim": 32,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": True,
            }
        )
    )
    arguments = EngineArgs(
        model=str(tmp_path),
        device="cpu",
        dtype="float32",
        cpu_threads=1,
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 20,
    )  # 1,024 bytes a token
    async with AsyncLLM.from_engine_args(arguments) as llm:
        assert llm.max_model_len == 1024
        async for out in llm.generate([5] * 1020, SamplingParams(max_tokens=None, ignore_eos=True)):
            pass
        assert len(out.outputs[0].token_ids) == 4
