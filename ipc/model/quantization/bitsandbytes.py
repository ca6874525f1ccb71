"""bitsandbytes: the NormalFloat in 4 bits, and whole numbers of 8 bits."""

from __future__ import annotations

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    PLAIN_HEAD,
    QuantizationSpec,
    WeightScheme,
    plain_rules,
)

BLOCK = 64
"""Numbers that share a scale, which files may state otherwise."""


def read_bitsandbytes(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "bitsandbytes"."""
    four = config.flag("load_in_4bit", "_load_in_4bit")
    if four == config.flag("load_in_8bit", "_load_in_8bit"):
        config.refuse("load_in_4bit", "must be true, or load_in_8bit, and not both")
    rules = *plain_rules(config.names("llm_int8_skip_modules")), PLAIN_HEAD
    scheme = WeightScheme(kind="int8")
    if four:
        kind = config.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        # Its numbers of fp4 are others than those of e2m1.
        scheme = WeightScheme(kind="nf4", columns=BLOCK, decoded=kind == "fp4")
    return QuantizationSpec(method="bitsandbytes", rules=rules, default=scheme)
