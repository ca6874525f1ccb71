"""Checkpoints of gpt-oss, whose experts are one tensor, plain or in blocks of MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sidestep.executor.layers.experts.fused_experts import FusedExperts, Mxfp4Experts
from sidestep.executor.layers.experts.layer import Experts
from sidestep.executor.layers.layouts import rounding_layouts
from sidestep.executor.layers.layouts.native_matrices import kernel_of
from sidestep.executor.parallel.parallel_state import Parallel
from sidestep.executor.runner.input_batch import HostBatch
from sidestep.executor.weights.weight_loader import SafetensorsWeights
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.experts.common.expert_matrix import decode_mxfp4
from sidestep.kernels.native.experts import CODED, SOURCE
from sidestep.kernels.ops.rms_norm import Stream
from tests.e2e.models import load_reference, random_prompts, reference_tokens, write_model
from tests.unit.executor.steps import Request
from tests.unit.executor.test_model_runner import VOCAB, make_runner, run

EXPERTS = "model.layers.0.mlp.experts"


def random_blocks(*shape: int, low: int = 0, high: int = 255) -> tuple[Tensor, Tensor]:
    """Return the blocks and the scales of a tensor of this shape, with all codes."""
    *outer, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))
    blocks = torch.randint(256, (*outer, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(low, high, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
    return blocks, scales


def write_packed(folder: Path, **changes: Any) -> tuple[str, str]:
    """Write a model twice: with the numbers that transformers decodes, and with blocks of MXFP4.

    changes: fields of its configuration. Returns both folders.
    """
    plain, packed = folder / "plain", folder / "packed"
    for place in (plain, packed):
        write_model("gpt-oss", place, **changes)
    numbers = load_file(plain / "model.safetensors")
    blocks = dict(numbers)
    for name, tensor in numbers.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            # The numbers are about as large as those that they replace.
            parts = random_blocks(*tensor.transpose(1, 2).shape, low=122, high=125)
            blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = parts
            del blocks[name]
            numbers[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    save_file(blocks, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config["quantization_config"] = quantization
    (packed / "config.json").write_text(json.dumps(config))
    return str(plain), str(packed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the folders of one model with plain experts, and with packed ones."""
    return write_packed(tmp_path_factory.mktemp("gpt-oss"))


def test_numbers_are_decoded_as_transformers_decodes_them() -> None:
    blocks, scales = random_blocks(3, 40, 224)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(decode_mxfp4(blocks.flatten(2), scales), expected)


def test_packed_experts_give_the_tokens_of_transformers(folders: tuple[str, str]) -> None:
    plain, packed = folders
    prompts, counts = random_prompts(12, VOCAB, longest=60), [8] * 12
    expected = reference_tokens(load_reference(plain), prompts, counts)
    requests = [Request(p, n) for p, n in zip(prompts, counts, strict=True)]
    assert run(make_runner(packed, block_size=8), requests, 33, 8) == expected


def last_states(path: str, prompt: list[int]) -> Tensor:
    """Return the stream behind the last layer, of all tokens of a prompt."""
    runner, seen = make_runner(path), list[Tensor]()
    states = runner._model.states

    def noted(inputs: Tensor, batch: HostBatch, rows: Tensor | None) -> Stream:
        seen.append(states(inputs, batch, None).hidden.clone())
        return states(inputs, batch, rows)

    runner._model.states = noted  # type: ignore[method-assign]
    run(runner, [Request(prompt, 1)])
    return seen[0]


def test_experts_that_keep_four_bits_on_a_cpu_are_near_decoded_ones(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the published sizes keep them; these are so small that they would be decoded."""
    _, packed = folders
    if kernel_of(SOURCE, "products", torch.float32, CODED) is None:
        pytest.skip("this CPU multiplies decoded numbers")
    (prompt,) = random_prompts(1, VOCAB, longest=60, seed=3)
    decoded = last_states(packed, prompt)
    monkeypatch.setattr(rounding_layouts, "_FEWEST_NUMBERS", 1)
    runner = make_runner(packed)
    experts = runner._model.decoder._layers[0]._mlp
    assert isinstance(experts, Experts) and "coded" in repr(experts._products)
    kept = last_states(packed, prompt)
    assert 0 < (kept - decoded).norm() <= 0.03 * decoded.norm()
    prompts = random_prompts(12, VOCAB, longest=60)
    apart = [run(make_runner(packed), [Request(one, 8)])[0] for one in prompts[:3]]
    together = run(runner, [Request(one, 8) for one in prompts], 33)
    assert together[:3] == apart


def load_rank(path: str, rank: int, ranks: int) -> FusedExperts:
    """Return what loads a rank's part of the experts of layer 0."""
    spec = load_model_spec(path)
    experts: Any = spec.layers[0].mlp
    parallel = Parallel()
    parallel.rank, parallel.size = rank, ranks
    weights = SafetensorsWeights(path, torch.float32, torch.device("cpu"))
    kind = Mxfp4Experts if experts.stored == "mxfp4" else FusedExperts
    return kind(experts, spec.hidden_size, weights, "model.layers.0.mlp", parallel)


@pytest.mark.parametrize("stored", [0, 1], ids=["plain", "packed"])
def test_ranks_have_parts_of_the_whole(folders: tuple[str, str], stored: int) -> None:
    whole = load_rank(folders[0], 0, 1)
    parts = [load_rank(folders[stored], rank, 2) for rank in range(2)]
    for expert in (0, 4):
        gate, up = whole.gate_up(expert).values.chunk(2)
        gate_bias, up_bias = whole.gate_up(expert).bias.chunk(2)  # type: ignore[union-attr]
        down = whole.down(expert)
        for rank, part in enumerate(parts):
            own = slice(32 * rank, 32 * rank + 32)
            both = part.gate_up(expert).decoded(torch.float32)
            assert torch.equal(both.values, torch.cat([gate[own], up[own]]))
            assert both.bias is not None
            assert torch.equal(both.bias, torch.cat([gate_bias[own], up_bias[own]]))
            second = part.down(expert).decoded(torch.float32)
            assert torch.equal(second.values, down.values[:, own])
        assert parts[0].down(expert).bias is not None
        assert torch.equal(parts[0].down(expert).bias, down.bias)  # type: ignore[arg-type]
        assert parts[1].down(expert).bias is None, "it is added once"


def test_a_block_is_not_divided_among_ranks(folders: tuple[str, str]) -> None:
    spec = load_model_spec(folders[1])
    found = {one.name: [n for n in (1, 2, 4) if one.fits(n)] for one in spec.divided}
    assert found["blocks of 32 of an expert's intermediate size"] == [1, 2]
    assert "intermediate size of an expert" not in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 48}, "intermediate_size .* multiple of 32 for mxfp4"),
        ({"hidden_size": 72}, "hidden_size .* multiple of 32 for mxfp4"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
        ({"rope_parameters": None}, "rope_parameters .* is missing"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(
    changes: dict[str, Any], message: str, folders: tuple[str, str], tmp_path: Path
) -> None:
    config = json.loads((Path(folders[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineStartError, match=message):
        load_model_spec(str(tmp_path))


def test_blocks_that_are_no_bytes_are_refused(folders: tuple[str, str], tmp_path: Path) -> None:
    tensors = load_file(Path(folders[1]) / "model.safetensors")
    name = f"{EXPERTS}.down_proj_scales"
    save_file({**tensors, name: tensors[name].float()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(folders[1]) / "config.json").read_text())
    with pytest.raises(EngineStartError, match=rf"{name} is torch\.float32 .* not uint8"):
        make_runner(str(tmp_path))
