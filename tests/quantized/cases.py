"""Forms of every registered method's files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.quantized.by_packages import (
    PER_TOKEN,
    STATIC,
    bitsandbytes_config,
    compressed,
    config_of,
    eight_bits,
    four_bits,
    scheme_of,
)
from tests.quantized.bytes_of_fp8 import block_fp8, nvfp4, row_fp8, tensor_fp8
from tests.quantized.whole_numbers import awq, awq_config, gptq, gptq_config
from tests.quantized.written import SIZES, Case, Encoded, Encoder, only_layers

WIDE = {**SIZES, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
ODD: dict[str, Any] = {"num_hidden_layers": 2}
"""Sizes of llama-mqa-odd-sizes: inputs of 60, 94 and 120."""
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def _ct(
    form: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    **case: Any,
) -> Case:
    """Return a case of compressed-tensors with one group."""
    scheme = scheme_of(form, weights, inputs, ["Linear"])
    return Case(config_of(scheme), only_layers(compressed(scheme, dtype)), **case)


def _ints(bits: int, strategy: str, group: int | None = None, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": strategy, "group_size": group, **others}


def _floats(bits: int, strategy: str, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, **others}


def _layers(config: dict[str, Any], encode: Encoder, **case: Any) -> Case:
    return Case(config, only_layers(encode), **case)


def _by_name(chosen: dict[str, Encoder | None], usual: Encoder) -> Encoder:
    """Return an encoder for some matrices by parts of their names; None for plain ones."""

    def encode(name: str, weight: Tensor) -> Encoded | None:
        found = next((own for part, own in chosen.items() if part in name), usual)
        return None if found is None or name == "lm_head" else found(name, weight)

    return encode


def _mixed() -> Case:
    """Return a case of several groups and formats, of which some matrices are left plain."""
    attention = scheme_of("int-quantized", _ints(8, "channel"), PER_TOKEN, ["re:.*self_attn.*"])
    others = scheme_of("pack-quantized", _ints(4, "group", 32), None, ["Linear"])
    one = scheme_of(
        "float-quantized", _floats(8, "channel"), None, ["model.layers.1.mlp.down_proj"]
    )
    ignore = ["lm_head", r"re:.*layers\.1\.self_attn\.[qkv]_proj$", "model.layers.0.mlp.down_proj"]
    plain = dict.fromkeys([*(f"layers.1.self_attn.{one}_proj" for one in "qkv"), "0.mlp.down"])
    chosen = {"self_attn": compressed(attention), "layers.1.mlp.down": compressed(one)}
    return Case(
        config_of(others, attention, one, ignore=ignore, form="mixed-precision"),
        _by_name({**plain, **chosen}, compressed(others)),
    )


def _with_head(form: str, weights: dict[str, Any], ranks: tuple[int, ...] = (1, 2)) -> Case:
    """Return a case with a quantized head, of 257 rows."""
    scheme = scheme_of(form, weights, None, ["Linear"])
    return Case(config_of(scheme, ignore=[]), compressed(scheme), ranks=ranks, **_odd)


_odd: dict[str, Any] = {"family": "llama-mqa-odd-sizes", "changes": ODD}
CASES: dict[str, dict[str, Case]] = {
    "gptq": {
        "asym-g32": _layers(gptq_config(), gptq()),
        "sym": _layers(gptq_config(sym=True), gptq(zeros=False)),
        "8-bits": _layers(gptq_config(8), gptq(8)),
        "all-inputs": _layers(gptq_config(4, -1), gptq(4, -1)),
        "8-bits-all-inputs": _layers(gptq_config(8, -1), gptq(8, -1, has_groups=False)),
        "desc-act": _layers(gptq_config(desc_act=True), gptq(ordered=False)),
        "desc-act-8-bits": _layers(gptq_config(8, desc_act=True), gptq(8, ordered=False)),
        "last-group-short": _layers(gptq_config(4, 48), gptq(4, 48), ranks=(1,)),
        "format-v2": _layers(gptq_config(checkpoint_format="gptq_v2"), gptq(version=2)),
        "quantized-head": Case(
            gptq_config(lm_head=True), gptq(), changes={**SIZES, "vocab_size": 328}
        ),
        "dynamic": Case(
            gptq_config(
                dynamic={
                    r"+:.*\.down_proj$": {"bits": 8, "group_size": 64},
                    r"-:model\.layers\.1\.self_attn": {},
                }
            ),
            _by_name({"down_proj": gptq(8, 64), "layers.1.self_attn": None}, gptq()),
        ),
        "older-file": _layers(gptq_config(), gptq(), config_file="quantize_config.json"),
    },
    "gptq_v2": {
        "asym": _layers(gptq_config(quant_method="gptq_v2"), gptq(version=2)),
        "8-bits": _layers(gptq_config(8, quant_method="gptq_v2"), gptq(8, version=2)),
    },
    "awq": {
        "g32": _layers(awq_config(), awq()),
        "all-inputs": _layers(awq_config(-1), awq(-1)),
        "sym": _layers(awq_config(zero_point=False), awq(zeros=False)),
        "last-group-short": _layers(awq_config(48), awq(48), ranks=(1,)),
        "older-file": _layers(
            {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
            awq(),
            config_file="quant_config.json",
        ),
    },
    "auto-round": {
        "as-gptq": _layers(
            gptq_config(quant_method="auto-round", packing_format="auto_round:auto_gptq"), gptq()
        ),
        "extra-config": Case(
            gptq_config(
                quant_method="auto-round",
                extra_config={
                    "model.layers.0.mlp.down_proj": {"bits": 8},
                    r".*layers\.1\.self_attn\..*": {"bits": 16, "data_type": "float"},
                },
            ),
            _by_name({"layers.0.mlp.down_proj": gptq(8), "layers.1.self_attn": None}, gptq()),
        ),
        "as-awq": _layers(
            {**awq_config(), "quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
            awq(),
        ),
    },
    "fp8": {
        "blocks-within-ranks": _layers(
            {**FP8, "weight_block_size": [16, 32]}, block_fp8(16, 32, dtype=torch.float32)
        ),
        "blocks-across-ranks": _layers(
            {**FP8, "weight_block_size": [24, 32]}, block_fp8(24, 32, dtype=torch.bfloat16)
        ),
        "blocks-of-128": _layers({**FP8, "weight_block_size": [128, 128]}, block_fp8(128, 128)),
        "odd-sizes": _layers(
            {**FP8, "weight_block_size": [32, 50]}, block_fp8(32, 50), ranks=(1,), **_odd
        ),
        "powers-of-two": _layers(
            {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
            block_fp8(32, 32, powers=True),
        ),
        "bytes-of-powers": _layers(
            {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
            block_fp8(32, 32, powers=True, dtype=torch.float8_e8m0fnu),
        ),
        "one-a-matrix": _layers(FP8, tensor_fp8(), **_odd),
        "static": _layers({**FP8, "activation_scheme": "static"}, tensor_fp8(static=True)),
        "fused-files": _layers(FP8, tensor_fp8(), family="phi3-window"),
        "fused-blocks": _layers(
            {**FP8, "weight_block_size": [40, 32]}, block_fp8(40, 32), family="phi3-window"
        ),
        "some-plain": Case(
            {
                **FP8,
                "modules_to_not_convert": ["model.layers.0.mlp", "layers.1.self_attn.qkv_proj"],
            },
            _by_name(
                dict.fromkeys(
                    ["layers.0.mlp", *(f"layers.1.self_attn.{one}_proj" for one in "qkv")]
                ),
                tensor_fp8(),
            ),
        ),
        "grouped-heads": _layers(
            {**FP8, "weight_block_size": [20, 24]},
            block_fp8(20, 24),
            family="qwen3-next",
            changes={"mlp_only_layers": [0, 1, 2, 3]},
            ranks=(1,),
        ),
        "grouped-heads-by-tensor": _layers(
            FP8,
            tensor_fp8(),
            family="qwen3-next",
            changes={"mlp_only_layers": [0, 1, 2, 3]},
        ),
    },
    "fbgemm_fp8": {
        "columns": _layers(
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, row_fp8()
        ),
        "vectors": _layers({"quant_method": "fbgemm_fp8"}, row_fp8(dims=1), **_odd),
    },
    "modelopt": {
        "fp8": _layers(
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
            tensor_fp8(static=True),
        ),
        "nvfp4": _layers(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]}, nvfp4
        ),
        "older-file": _layers(
            {
                "producer": {"name": "modelopt"},
                "quantization": {
                    "quant_algo": "FP8",
                    "kv_cache_quant_algo": None,
                    "exclude_modules": ["lm_head", "*mlp.gate"],
                },
            },
            tensor_fp8(static=True),
            config_file="hf_quant_config.json",
        ),
    },
    "compressed-tensors": {
        "w4a16-g32": _ct("pack-quantized", _ints(4, "group", 32)),
        "w4a16-g64": _ct("pack-quantized", _ints(4, "group", 64)),
        "w4a16-g128": _ct(
            "pack-quantized",
            _ints(4, "group", 128),
            changes=WIDE,
            ranks=(1,),
        ),
        "w4a16-asym": _ct("pack-quantized", _ints(4, "group", 32, symmetric=False)),
        "w4a16-channel": _ct("pack-quantized", _ints(4, "channel")),
        "w4a16-channel-asym": _ct("pack-quantized", _ints(4, "channel", symmetric=False)),
        "w4a16-odd": _ct("pack-quantized", _ints(4, "channel"), ranks=(1,), **_odd),
        "w8a16-g32": _ct("pack-quantized", _ints(8, "group", 32)),
        "w8a16-asym": _ct("pack-quantized", _ints(8, "group", 32, symmetric=False)),
        "w8a8-channel": _ct("int-quantized", _ints(8, "channel"), PER_TOKEN, **_odd),
        "w8a8-tensor": _ct("int-quantized", _ints(8, "tensor"), PER_TOKEN),
        "w8a8-static": _ct("int-quantized", _ints(8, "channel"), {**STATIC, "type": "int"}, **_odd),
        "w8a8-asym": _ct("int-quantized", _ints(8, "channel", symmetric=False), PER_TOKEN),
        "w4a8": _ct("int-quantized", _ints(4, "group", 32), PER_TOKEN),
        "fp8-tensor": _ct("float-quantized", _floats(8, "tensor"), STATIC, **_odd),
        "fp8-channel": _ct(
            "float-quantized", _floats(8, "channel"), {**PER_TOKEN, "type": "float"}
        ),
        "fp8-block": _ct(
            "float-quantized",
            _floats(8, "block", block_structure=[32, 32]),
            {**PER_TOKEN, "type": "float", "strategy": "group", "group_size": 32},
        ),
        "fp8-blocks-cut": _ct(
            "float-quantized", _floats(8, "block", block_structure=[24, 32]), None
        ),
        "naive-fp8": _ct("naive-quantized", _floats(8, "channel"), **_odd),
        "naive-int8": _ct("naive-quantized", _ints(8, "channel"), **_odd),
        "nvfp4": _ct(
            "nvfp4-pack-quantized",
            _floats(4, "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
            # The package computes in bfloat16.
            rtol=0.01,
        ),
        "mixed": _mixed(),
        "quantized-head": _with_head("float-quantized", _floats(8, "channel")),
        "quantized-head-asym": _with_head(
            "pack-quantized", _ints(4, "channel", symmetric=False), ranks=(1,)
        ),
        "mxfp4": _ct(
            "mxfp4-pack-quantized",
            _floats(4, "group", group_size=32, scale_dtype=torch.uint8),
        ),
    },
    "bitsandbytes": {
        "nf4": _layers(bitsandbytes_config("nf4"), four_bits("nf4"), ranks=(1,)),
        "nf4-nested": _layers(
            bitsandbytes_config("nf4"), four_bits("nf4", nested=True), changes=WIDE
        ),
        "nf4-blocks-of-32": _layers(
            bitsandbytes_config("nf4"), four_bits("nf4", size=32), size_is_stated=False
        ),
        "nf4-odd": _layers(bitsandbytes_config("nf4"), four_bits("nf4"), **_odd),
        "fp4": _layers(bitsandbytes_config("fp4"), four_bits("fp4")),
        "int8": _layers(bitsandbytes_config(), eight_bits, **_odd),
    },
}
"""By method and name."""
