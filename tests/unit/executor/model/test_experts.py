"""Checkpoints with experts: packed ones, those that lack one, and tensors beside the experts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.executor.layers.experts import separate_experts
from sidestep.executor.layers.experts.cpu_experts import CpuExperts
from sidestep.executor.layers.experts.gpu_experts import GpuExperts, on_device
from sidestep.executor.layers.experts.packed_experts import Matrix, unpack_experts
from sidestep.executor.layers.experts.separate_experts import SeparateExperts, matrix_names
from sidestep.executor.layers.matrix_products import stacked
from sidestep.executor.models.decoder import DecoderForCausalLM
from sidestep.executor.models.model_loading import find_experts
from sidestep.executor.parallel.parallel_state import LoneRank
from sidestep.executor.quantization.quantized_files import EncodedMatrices
from sidestep.executor.weights.weight_loader import (
    DummyWeights,
    NoWeights,
    SafetensorsWeights,
    Shape,
)
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import with_whole_experts
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.ipc.model.layer_split import stage_of
from sidestep.ipc.model.model_size import num_parameters
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec, WeightScheme
from sidestep.kernels.ops.routing import Routed
from sidestep.kernels.quantized.coded_matrix import CodedMatrix
from tests.counting_weights import CountingWeights
from tests.e2e.models import FAMILIES, load_reference, random_prompts, write_model
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import make_runner, run

MOE = [family for family in FAMILIES if "moe" in family or family == "mixtral"]
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
RANK_1 = LoneRank(1, 2)


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


@pytest.mark.parametrize("scheme", [None, WeightScheme(kind="fp8")], ids=str)
def test_without_memory_one_expert_stands_for_all(scheme: WeightScheme | None) -> None:
    """Kernels are compiled from shapes. All experts of Qwen3-30B-A3B in FP8 took 79 seconds."""
    spec = ExpertsSpec(num_experts=64, num_chosen=2, width=32)

    class CountingNoWeights(NoWeights):
        count = 0

        def get(
            self, name: str, shape: Shape, rows: range | None = None, columns: range | None = None
        ) -> Tensor:
            self.count += 1
            return super().get(name, shape, rows, columns)

    weights = CountingNoWeights(torch.bfloat16, torch.device("meta"))
    if scheme is not None:
        weights.matrices = EncodedMatrices(QuantizationSpec(method="fp8", default=scheme))
    GpuExperts(SeparateExperts(spec, 64, weights, "mlp", LoneRank(0, 1)))
    assert weights.count == 3


@pytest.mark.parametrize("rank", [LoneRank(0, 1), RANK_1], ids=["whole", "part"])
@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(kind="fp8"),
        WeightScheme(kind="fp8", rows=16, columns=32),
        WeightScheme(kind="fp8", rows=24),  # the rows of an expert are no multiple
        WeightScheme(kind="int8"),
        WeightScheme(kind="int8", rows=0),
        WeightScheme(kind="int4", columns=32, offset=True),
    ],
    ids=str,
)
def test_experts_that_are_rounded_together_are_as_each_by_itself(
    scheme: WeightScheme, rank: LoneRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ExpertsSpec(num_experts=5, num_chosen=2, width=64)
    monkeypatch.setattr(separate_experts, "_AT_ONCE", 2 * 2 * 64 * 96 * 4)  # two experts
    weights = DummyWeights(3, torch.float32, torch.device("cpu"))
    weights.matrices = EncodedMatrices(QuantizationSpec(method="fp8", default=scheme))
    loaded = SeparateExperts(spec, 96, weights, "mlp", rank)
    part = rank.share(64)
    for expert in (0, 1, 2, 3, 4, 2):
        gate, up, down = matrix_names(spec, "mlp", expert)
        halves = {one: weights.matrix(one, (64, 96), rows=part) for one in (gate, up)}
        assert_same(loaded.gate_up(expert), stacked(halves))
        assert_same(loaded.down(expert), weights.matrix(down, (96, 64), columns=part))


def assert_same(found: object, expected: object) -> None:
    assert isinstance(found, CodedMatrix) and isinstance(expected, CodedMatrix)
    for one in fields(CodedMatrix):
        a, b = getattr(found, one.name), getattr(expected, one.name)
        if isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, one.name


def pack(path: str, folder: Path) -> str:
    """Write the model as transformers has it in memory, with packed experts."""
    load_reference(path).save_pretrained(folder, save_original_format=False)
    return str(folder)


@pytest.mark.parametrize("family", [*MOE, "qwen3-next"])
def test_packed_experts_are_the_same_model(family: str, tmp_path: Path) -> None:
    path = write_model(family, tmp_path / "apart")
    packed = pack(path, tmp_path / "packed")
    assert any(n.endswith("gate_up_proj") for n in load_file(f"{packed}/model.safetensors"))
    prompts = random_prompts(4, 331, longest=40)
    apart, together = (
        run(make_runner(one), [Request(prompt, 5) for prompt in prompts]) for one in (path, packed)
    )
    assert together == apart


def test_of_packed_experts_a_rank_reads_its_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(write_model("qwen3-moe", tmp_path / "apart"), tmp_path / "packed")
    spec = load_model_spec(packed)
    read = list[Tensor]()
    plain = Matrix.__getitem__

    def getitem(self: Matrix, index: Any) -> Tensor:
        read.append(plain(self, index))
        return read[-1]

    monkeypatch.setattr(Matrix, "__getitem__", getitem)
    with SafetensorsWeights(packed, torch.float32, torch.device("cpu")) as weights:
        experts = spec.layers[1].mlp
        assert isinstance(experts, ExpertsSpec)
        unpack_experts(weights, "model.layers.1", experts, spec.hidden_size)
        loaded = SeparateExperts(experts, spec.hidden_size, weights, "model.layers.1.mlp", RANK_1)
        whole = load_file(f"{packed}/model.safetensors")
        gate_up = whole["model.layers.1.mlp.experts.gate_up_proj"][4].unflatten(0, (2, -1))
        assert torch.equal(on_device(loaded.gate_up(4))[0], gate_up[:, 18:].flatten(0, 1))
        down = whole["model.layers.1.mlp.experts.down_proj"][4]
        assert torch.equal(on_device(loaded.down(4))[0], down[:, 18:])
    assert sum(one.numel() for one in read) == 3 * 18 * 48


def test_packed_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    packed = pack(write_model("olmoe", tmp_path / "apart"), tmp_path / "packed")
    whole = load_file(f"{packed}/model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({**whole, name: whole[name][:5].clone()}, f"{packed}/model.safetensors")
    with pytest.raises(EngineStartError, match=rf"{name} has shape \[5, 48, 40\] in the checkp"):
        make_runner(packed)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_with_whole_experts_reads_what_the_specification_says(
    ranks: int, tmp_path: Path
) -> None:
    spec = with_whole_experts(load_model_spec(write_model("glm4-moe", tmp_path)))
    weights = CountingWeights()
    DecoderForCausalLM(spec, weights, LoneRank(0, ranks))
    assert weights.count == num_parameters(spec, ranks, first=True, last=True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_with_whole_experts_reads_no_others(packed: bool, tmp_path: Path) -> None:
    path = write_model("glm4-moe", tmp_path / "apart")
    path = pack(path, tmp_path / "packed") if packed else path
    spec = with_whole_experts(load_model_spec(path))
    experts = spec.layers[1].mlp
    assert isinstance(experts, ExpertsSpec)
    with SafetensorsWeights(path, torch.float32, torch.device("cpu")) as weights:
        find_experts(weights, spec, stage_of((3,), 0), RANK_1)
        loaded = SeparateExperts(experts, spec.hidden_size, weights, "model.layers.1.mlp", RANK_1)
        assert loaded.experts == range(4, 8)
        for expert in loaded.experts:
            assert loaded.gate_up(expert).shape == (2 * 24, 48)
            assert loaded.down(expert).shape == (48, 24)
        weights.ignore("lm_head", "model.embed", "model.norm", "model.layers.0", "model.layers.2")
        layer = "model.layers.1"
        weights.ignore(f"{layer}.self_attn", f"{layer}.input_layernorm", f"{layer}.post_attention")
        weights.ignore(f"{layer}.mlp.gate.", f"{layer}.mlp.shared_experts")
        weights.finish()  # no other rank's matrix is missed


def test_tokens_without_an_expert_on_a_rank_get_nothing_from_it(tmp_path: Path) -> None:
    path = write_model("glm4-moe", tmp_path)
    spec = with_whole_experts(load_model_spec(path)).layers[1].mlp
    assert isinstance(spec, ExpertsSpec)
    with SafetensorsWeights(path, torch.float32, torch.device("cpu")) as weights:
        loaded = SeparateExperts(spec, 48, weights, "model.layers.1.mlp", RANK_1)
        products = CpuExperts(loaded, torch.float32)
    ids = torch.tensor([[0, 2, 1], [3, 4, 5], [1, 7, 2]], dtype=torch.int32)
    routed = Routed(ids, torch.ones(3, 3)).on_rank(RANK_1.share(8))
    out = torch.empty(3, 48)
    products(torch.randn(3, 48), routed, out, add=False)
    assert not out[0].any() and out[1].any() and out[2].any()
