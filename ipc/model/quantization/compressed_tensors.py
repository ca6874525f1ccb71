"""The formats of compressed-tensors."""

from __future__ import annotations

import re

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    QuantizationSpec,
    SchemeRule,
    WeightScheme,
    names_pattern,
    plain_rules,
)

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_CLASSES = ("Linear",)
"""Targets that name all matrices of products."""


def read_compressed_tensors(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "compressed-tensors"."""
    config.choice("format", FORMATS, "dense")
    for name in ("sparsity_config", "transform_config"):
        inner = config.get(name)
        if inner and (not isinstance(inner, dict) or inner.get("format", "dense") != "dense"):
            config.refuse(name, "is not supported; supported are files without it")
    rules = [*plain_rules(config.names("ignore"))]
    default = None
    for group in config.part("config_groups").parts():
        scheme = _scheme(group)
        for target in group.names("targets"):
            if target in _CLASSES:
                default = scheme
            else:
                rules.append(SchemeRule(pattern=_target(target), scheme=scheme))
    return QuantizationSpec(method="compressed-tensors", rules=tuple(rules), default=default)


def _target(target: str) -> str:
    """Return the pattern of a target: a regular expression, or a module's name."""
    if target.startswith("re:"):
        return names_pattern(target)
    return re.escape(target) + "$"


def _scheme(group: QuantConfig) -> WeightScheme:
    """Return the scheme of a group's weights."""
    weights = group.part("weights")
    bits, kind = weights.whole("num_bits"), weights.choice("type", ("int", "float"), "int")
    codes = {("int", 8): "int8", ("int", 4): "int4", ("float", 8): "fp8", ("float", 4): "fp4"}
    if (kind, bits) not in codes:
        weights.refuse("num_bits", f"is {bits} of type {kind}; supported are 4 and 8")
    strategy = weights.choice(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor"
    )
    rows, columns = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy in ("group", "tensor_group"):
        columns = weights.whole("group_size")
    elif strategy == "block":
        rows, columns = weights.get("block_structure") or (128, 128)
    return WeightScheme(
        kind=codes[kind, bits],  # type: ignore[arg-type]
        rows=rows,
        columns=max(0, columns),
        offset=not weights.flag("symmetric", default=True),
    )
