"""FP8 as DeepSeek's and Qwen's checkpoints have it, and with one scale a matrix or a row."""

from __future__ import annotations

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    PLAIN_HEAD,
    QuantizationSpec,
    WeightScheme,
    plain_rules,
)

NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Names of the list of modules that are not quantized."""
NVFP4_GROUP = 16
"""Inputs that share a scale in NVFP4."""


def read_fp8(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "fp8"."""
    config.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is None:
        scheme = WeightScheme(kind="fp8", rows=0, activations="fp8")
    elif isinstance(block, list) and len(block) == 2 and all(_is_size(one) for one in block):
        rows, columns = block
        scheme = WeightScheme(kind="fp8", rows=rows, columns=columns, activations="fp8")
    else:
        config.refuse("weight_block_size", f"must be two whole numbers, not {block!r}")
    rules = *plain_rules(config.names(*NOT_CONVERTED)), PLAIN_HEAD
    return QuantizationSpec(method="fp8", rules=rules, default=scheme)


def read_fbgemm(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "fbgemm_fp8": a scale a row."""
    rules = *plain_rules(config.names(*NOT_CONVERTED)), PLAIN_HEAD
    scheme = WeightScheme(kind="fp8", activations="fp8")
    return QuantizationSpec(method="fbgemm_fp8", rules=rules, default=scheme)


def read_modelopt(config: QuantConfig) -> QuantizationSpec:
    """Read what modelopt writes, into config.json or hf_quant_config.json."""
    own = config.part("quantization") if config.get("quantization") is not None else config
    algorithm = own.choice("quant_algo", ("FP8", "NVFP4"))
    excluded = map(_any_part, own.names("exclude_modules", "ignore"))
    rules = *plain_rules(excluded), PLAIN_HEAD
    scheme = WeightScheme(kind="fp8", rows=0, activations="fp8")
    if algorithm == "NVFP4":
        scheme = WeightScheme(kind="fp4", columns=own.whole("group_size", default=NVFP4_GROUP))
    return QuantizationSpec(method="modelopt", rules=rules, default=scheme)


def _any_part(entry: str) -> str:
    """Return modelopt's pattern, whose stars stand for anything, as a regular expression."""
    if "*" not in entry:
        return entry
    return "re:" + entry.replace(".", r"\.").replace("*", ".*") + "$"


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
