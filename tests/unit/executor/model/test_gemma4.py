"""Gemma 4's checkpoints, and heads of several shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep.executor.attention.base import AttentionSetup, AttentionShape
from sidestep.executor.attention.mixed_shapes import MixedShapes
from sidestep.executor.attention.triton_backend import TritonAttention
from sidestep.ipc.common.errors import EngineStartError
from tests.e2e.models import random_prompts, write_model
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_unused_keys_of_layers_that_share_are_allowed(tmp_path: Path) -> None:
    """Published files have projections that no layer reads; others are refused still."""
    path = write_model("gemma4-token-inputs", tmp_path)
    requests = [Request(prompt, 4) for prompt in random_prompts(3, 331, longest=40)]
    expected = run(make_runner(path), requests)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.{}.self_attn.k_proj.weight"
    assert name.format(2) in tensors and name.format(3) not in tensors
    more = {name.format(layer): torch.ones(2, 2) for layer in (3, 4, 5, 6)}
    save_file(tensors | more, file)
    requests = [Request(prompt, 4) for prompt in random_prompts(3, 331, longest=40)]
    assert run(make_runner(path), requests) == expected
    save_file(tensors | {"model.layers.3.self_attn.other": torch.ones(2)}, file)
    with pytest.raises(EngineStartError, match=r"layers\.3\.self_attn\.other"):
        make_runner(path)


def test_each_shape_of_heads_has_a_backend_and_all_share_the_memory(tmp_path: Path) -> None:
    backend = make_runner(write_model("gemma4", tmp_path), block_size=8)._model.attention
    assert isinstance(backend, MixedShapes)
    inner = backend._inner
    assert [one._shape.head_dim for one in inner] == [16, 24]  # type: ignore[attr-defined]
    storages = {part.data_ptr() for part in backend.cache.parts}
    assert all({part.data_ptr() for part in one.cache.parts} == storages for one in inner)


def test_a_gpu_refuses_drafts_for_heads_of_512_values() -> None:
    setup = AttentionSetup(
        shape=AttentionShape(num_layers=1, num_heads=8, num_kv_heads=1, head_dim=512, windows=(0,)),
        num_blocks=4,
        block_size=64,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        rotary=[],
        norm_eps=1e-6,
        max_rows=4,
        queries=(1, 3),
    )
    with pytest.raises(EngineStartError, match="^speculative_config: .* heads of 512 values; supp"):
        TritonAttention(setup)
