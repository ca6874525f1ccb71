"""The formats of compressed-tensors."""

from __future__ import annotations

import re

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    Codes,
    QuantizationSpec,
    Rounded,
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
_LINEAR, _EMBEDDING = "Linear", "Embedding"
"""Targets that name all matrices of products, and the embedding."""
_BYTE_FORMATS = ("int-quantized", "naive-quantized")
"""Formats with a byte for each whole number, of however many bits it is."""


def read_compressed_tensors(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "compressed-tensors"."""
    common = config.choice("format", FORMATS, "dense")
    for name in ("sparsity_config", "transform_config"):
        inner = config.get(name)
        if inner and (not isinstance(inner, dict) or inner.get("format", "dense") != "dense"):
            config.refuse(name, "is not supported; supported are files without it")
    default, schemes = None, dict[str, WeightScheme | None]()
    for group in config.part("config_groups").parts():
        scheme = _scheme(group, common)
        for target in group.names("targets"):
            if target == _EMBEDDING:
                group.refuse("targets", f"has {_EMBEDDING}, whose quantization is not supported")
            elif target == _LINEAR:
                default = scheme
            else:
                schemes[target] = scheme
    # A module's name counts before regular expressions, and those before its class.
    order = sorted(schemes, key=lambda target: (target.startswith("re:"), target))
    rules = [SchemeRule(pattern=_target(target), scheme=schemes[target]) for target in order]
    ignored = plain_rules(config.names("ignore"))
    return QuantizationSpec(method="compressed-tensors", rules=(*ignored, *rules), default=default)


def _target(target: str) -> str:
    """Return the pattern of a target: a regular expression, or a module's name."""
    if target.startswith("re:"):
        return names_pattern(target)
    return re.escape(target) + "$"


def _scheme(group: QuantConfig, common: str) -> WeightScheme | None:
    """Return the scheme of a group's weights; None for plain ones. common: the files' format."""
    form = group.choice("format", FORMATS, common)
    if group.get("weights") is None:
        return None
    weights = group.part("weights")
    bits, kind = (
        weights.whole("num_bits", default=8),
        weights.choice("type", ("int", "float"), "int"),
    )
    codes: dict[tuple[str, int], Codes] = {
        ("int", 8): "int8",
        ("int", 4): "int4",
        ("float", 8): "fp8",
        ("float", 4): "fp4",
    }
    if (kind, bits) not in codes:
        weights.refuse("num_bits", f"is {bits} of type {kind}; supported are 4 and 8")
    in_bytes = kind == "int" and form in _BYTE_FORMATS
    strategy = weights.choice(
        "strategy", ("tensor", "channel", "group", "block", "tensor_group"), "tensor"
    )
    rows, columns = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy in ("group", "tensor_group"):
        columns = weights.whole("group_size")
    elif strategy == "block":
        rows, columns = _block(weights)
    return WeightScheme(
        kind="int8" if in_bytes else codes[kind, bits],
        rows=rows,
        columns=max(0, columns),
        offset=not weights.flag("symmetric", default=True),
        decoded=weights.get("actorder") in ("group", True),
        activations=_activations(group, "int8" if in_bytes else codes[kind, bits]),
    )


def _activations(group: QuantConfig, codes: Codes) -> Rounded | None:
    """Return the type that inputs are rounded to, if they are and the tensor cores multiply it.

    Inputs with a zero of their own stay in the run's type, and so do inputs of four bits.
    """
    if group.get("input_activations") is None:
        return None
    inputs = group.part("input_activations")
    if inputs.whole("num_bits", default=8) != 8 or not inputs.flag("symmetric", default=True):
        return None
    rounded: Rounded = "int8" if inputs.choice("type", ("int", "float"), "int") == "int" else "fp8"
    return rounded if rounded == codes else None


def _block(weights: QuantConfig) -> tuple[int, int]:
    """Return the rows and the columns of a block."""
    block = weights.get("block_structure")
    if block is None:
        return 128, 128
    if isinstance(block, str):  # older files: "128x128"
        block = [int(one) if one.isdigit() else one for one in block.split("x")]
    if not isinstance(block, list) or len(block) != 2 or any(type(one) is not int for one in block):
        weights.refuse("block_structure", f"must be two whole numbers, not {block!r}")
    rows, columns = block
    return rows, columns
