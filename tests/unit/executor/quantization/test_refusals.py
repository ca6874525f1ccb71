"""Quantized models that cannot run are refused in one line, which names the part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.model.model_spec import load_model_spec
from sidestep.kernels.gpu import Gpu, like_gpu
from tests.e2e.models import write_model
from tests.quantized.by_packages import bitsandbytes_config
from tests.quantized.bytes_of_fp8 import block_fp8, tensor_fp8
from tests.quantized.cases import CASES, FP8
from tests.quantized.loaded import loaded
from tests.quantized.whole_numbers import awq_config, gptq, gptq_config
from tests.quantized.written import SIZES, Case, only_layers, state, write

DOWN = "model.layers.0.mlp.down_proj"
GROUPS = CASES["compressed-tensors"]["w4a16-g32"].config


def refusal(path: str, *, ranks: int = 1, **options: Any) -> str:
    """Return why a model does not start, which is one line."""
    with pytest.raises(EngineStartError) as caught:
        loaded(path, 0, ranks, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, **changes}


def weights(**fields: Any) -> dict[str, Any]:
    """Return GROUPS with other fields of its weights."""
    group = GROUPS["config_groups"]["group_0"]
    own = {**group, "weights": {**group["weights"], **fields}}
    return changed(GROUPS, config_groups={"group_0": own})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "torchao"}, "'torchao' is not supported; supported are auto-round, awq"),
        (gptq_config(3), "bits in quantization_config in config.json is 3; supported are 4 and 8"),
        (gptq_config(group_size=0), "group_size .* is 0"),
        ({**gptq_config(), "bits": "four"}, "bits .* must be a whole number, not 'four'"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format .* 'marlin'; supported are"),
        (gptq_config(dynamic={"+:.*": 3}), "dynamic .* must have an object"),
        (gptq_config(dynamic=[]), "dynamic .* must be an object"),
        (awq_config(bits=8), "bits .* is 8; supported are 4"),
        (awq_config(version="gemv"), "version .* is 'gemv'; supported is 'gemm'"),
        (changed(FP8, fmt="e5m2"), "fmt .* is 'e5m2'"),
        (changed(FP8, weight_block_size=[128]), "weight_block_size .* two whole numbers"),
        (changed(FP8, activation_scheme="odd"), "activation_scheme .* is 'odd'"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo .* 'W4A8_AWQ', .* supported are 'FP8', 'NVFP4'",
        ),
        (
            gptq_config(quant_method="auto-round", packing_format="auto_round:exllamav2"),
            "packing_format .* supported are auto_gptq and auto_awq",
        ),
        (gptq_config(quant_method="auto-round", data_type="mx_fp"), "data_type .* is 'mx_fp'"),
        (changed(GROUPS, format="marlin-24"), "format .* is 'marlin-24'"),
        (changed(GROUPS, sparsity_config={"format": "sparse-24"}), "sparsity_config"),
        (weights(num_bits=6), "num_bits in weights .* is 6 of type int"),
        (weights(strategy="attn_head"), "strategy .* is 'attn_head'"),
        (weights(strategy="block", block_structure=[1]), "block_structure .* two whole numbers"),
        (changed(bitsandbytes_config("nf4"), load_in_8bit=True), "load_in_4bit .* and not both"),
        (changed(bitsandbytes_config("nf4"), bnb_4bit_quant_type="q4"), "bnb_4bit_quant_type"),
    ],
)
def test_what_files_state_is_checked_before_any_process_starts(
    config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_model("llama-gqa", tmp_path)
    state(tmp_path, config)
    with pytest.raises(EngineStartError, match=words) as caught:
        load_model_spec(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("stated", "wanted", "words"),
    [
        (awq_config(), "gptq", "'gptq' does not fit the model, whose .* says 'awq'"),
        (awq_config(), "fp8", "'fp8' does not fit the model"),
        (None, "awq", ".* weights are plain, which 'awq' cannot read; .* fp8, int4, int8"),
    ],
)
def test_an_option_that_does_not_fit_the_files_is_refused(
    stated: dict[str, Any] | None, wanted: str, words: str, tmp_path: Path
) -> None:
    path = write_model("llama-gqa", tmp_path)
    if stated is not None:
        state(tmp_path, stated)
    with pytest.raises(EngineStartError, match=f"^quantization: {words}"):
        load_model_spec(path, quantization=wanted)


def test_an_option_that_names_the_files_method_is_allowed(tmp_path: Path) -> None:
    path = write_model("llama-gqa", tmp_path)
    state(tmp_path, awq_config())
    assert load_model_spec(path, quantization="awq") == load_model_spec(path)


def test_parts_of_one_product_must_be_quantized_alike(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Any:
        return None if "v_proj" in name else only_layers(tensor_fp8())(name, weight)

    path = write(Case(FP8, encode), tmp_path).quantized
    message = refusal(path)
    assert "self_attn.q_proj" in message and "self_attn.v_proj" in message
    assert "not quantized" in message and "alike" in message


def test_parts_of_several_forms_are_refused(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Any:
        return gptq(8 if "up_proj" in name else 4)(name, weight)

    config = gptq_config(dynamic={r"+:.*\.up_proj$": {"bits": 8}})
    path = write(Case(config, only_layers(encode)), tmp_path).quantized
    message = refusal(path)
    assert "gate_proj range(0, 128) is int4" in message and "up_proj" in message
    assert "int8" in message


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            Case(gptq_config(), only_layers(gptq()), changes={**SIZES, "intermediate_size": 96}),
            "32",
        ),
        (Case(gptq_config(4, -1), only_layers(gptq(4, -1)), changes={}), "multiple of 8"),
        (
            Case(
                {**FP8, "weight_block_size": [32, 48]},
                only_layers(block_fp8(32, 48)),
                changes=SIZES,
            ),
            "cut a group of 48",
        ),
    ],
)
def test_ranks_that_would_cut_a_group_or_a_word_are_refused(
    case: Case, words: str, tmp_path: Path
) -> None:
    path = write(case, tmp_path).quantized
    loaded(path)
    message = refusal(path, ranks=2)
    assert message.startswith("tensor_parallel_size: ") and "_proj" in message
    assert words in message and message.endswith("use fewer ranks")


def edited(path: str, name: str, change: Callable[[Tensor], Tensor]) -> None:
    file = Path(path) / "model.safetensors"
    whole = load_file(file)
    save_file({**whole, name: change(whole[name]).contiguous()}, file)


@pytest.mark.parametrize(
    ("method", "case", "end", "change", "words"),
    [
        ("gptq", "asym-g32", "qweight", lambda t: t.long(), "is torch.int64 .*, not torch.int32"),
        ("gptq", "asym-g32", "scales", lambda t: t.int(), "is torch.int32 .*, not torch.float32"),
        ("gptq", "asym-g32", "scales", lambda t: t[1:], "has shape"),
        ("gptq", "asym-g32", "g_idx", lambda t: t + 9, "groups that are not among the 4"),
        ("awq", "g32", "qzeros", lambda t: t.short(), "is torch.int16"),
        ("fp8", "one-a-matrix", "weight", lambda t: t.to(torch.float8_e5m2), "e5m2.*, not fp8"),
        ("fp8", "one-a-matrix", "weight", lambda t: t.to(torch.int8), "int8 in .*, not fp8"),
        ("fp8", "one-a-matrix", "weight_scale", lambda t: t.int(), "is torch.int32"),
        ("fp8", "blocks-within-ranks", "weight_scale_inv", lambda t: t[1:], "has shape"),
        ("compressed-tensors", "mxfp4", "weight_scale", lambda t: t.float(), "is torch.float32"),
        ("bitsandbytes", "int8", "SCB", lambda t: t.int(), "is torch.int32"),
        ("bitsandbytes", "int8", "weight_format", lambda t: t + 1, "is 1; supported"),
        ("bitsandbytes", "nf4", "weight", lambda t: t.char(), "is torch.int8"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_refused_by_name(
    method: str, case: str, end: str, change: Any, words: str, tmp_path: Path
) -> None:
    path = write(CASES[method][case], tmp_path).quantized
    edited(path, f"{DOWN}.{end}", change)
    with pytest.raises(EngineStartError, match=rf"{DOWN}\.{end} .*{words}|{DOWN}\.{end} {words}"):
        loaded(path)


@pytest.mark.parametrize(
    ("method", "case", "field"),
    [
        ("fp8", "blocks-within-ranks", "modules_to_not_convert"),
        ("awq", "g32", "modules_to_not_convert"),
        ("compressed-tensors", "w4a16-g32", "ignore"),
        ("bitsandbytes", "nf4", "llm_int8_skip_modules"),
    ],
)
def test_a_quantized_matrix_that_is_stated_to_be_plain_is_refused(
    method: str, case: str, field: str, tmp_path: Path
) -> None:
    own = CASES[method][case]
    path = write(own, tmp_path).quantized
    state(Path(path), changed(own.config, **{field: [DOWN]}))
    message = refusal(path)
    assert f"the checkpoint has {DOWN}." in message and "is not quantized" in message


def test_codes_of_which_no_file_says_anything_are_refused(tmp_path: Path) -> None:
    path = write(CASES["fp8"]["one-a-matrix"], tmp_path).quantized
    config = Path(path) / "config.json"
    values = json.loads(config.read_text())
    del values["quantization_config"]
    config.write_text(json.dumps(values))
    assert "nothing there says how it is quantized" in refusal(path)


def test_embeddings_are_not_read_in_a_quantized_form(tmp_path: Path) -> None:
    config = json.loads(json.dumps(GROUPS))
    config["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    path = write_model("llama-gqa", tmp_path)
    state(tmp_path, config)
    with pytest.raises(EngineStartError, match="targets .* has Embedding, .* not supported"):
        load_model_spec(path)


def test_groups_of_experts_that_no_kernel_reads_are_refused_on_a_gpu(tmp_path: Path) -> None:
    def encode(name: str, weight: Tensor) -> Any:
        return gptq(4, 24)(name, weight) if ".experts." in name else None

    sizes = {"hidden_size": 96, "moe_intermediate_size": 48}
    case = Case(gptq_config(4, 24), encode, family="qwen3-moe", changes=sizes)
    path = write(case, tmp_path).quantized
    with like_gpu(Gpu(90, 132), "cpu"):
        message = refusal(path)
    assert message.startswith("model: int4 in groups of 24 cannot be multiplied on a GPU")
