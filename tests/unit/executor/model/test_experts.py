"""Checkpoints with experts: those that lack one, and tensors beside the experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sidestep.executor.layers.weight_loader import SafetensorsWeights
from sidestep.ipc.common.errors import EngineStartError
from tests.e2e.models import write_model
from tests.unit.executor.test_model_runner import make_runner

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def test_layers_that_predict_further_tokens_are_not_used(tmp_path: Path) -> None:
    """Allow layer 3 of a model with three layers, which predicts a second token, and no other."""
    path = write_model("glm4-moe", tmp_path, num_nextn_predict_layers=1)
    whole = load_file(tmp_path / "model.safetensors")
    save_file(
        {**whole, "model.layers.3.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    make_runner(path)
    save_file({**whole, "model.layers.4.x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=r"model\.layers\.4\.x"):
        make_runner(path)


def test_the_bias_of_the_choice_is_not_rounded_to_the_run_s_type(tmp_path: Path) -> None:
    path = write_model("glm4-moe", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")[BIAS]
    assert not torch.equal(stored, stored.bfloat16().float())
    with SafetensorsWeights(path, torch.bfloat16, torch.device("cpu")) as weights:
        assert torch.equal(weights.exact(BIAS, (8,)), stored)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    path = write_model("mixtral", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.block_sparse_moe.experts.4.w3.weight"
    del whole[name]
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(EngineStartError, match=f"lacks {name}"):
        make_runner(path)
