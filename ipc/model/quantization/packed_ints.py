"""GPTQ and AWQ: whole numbers of 4 or 8 bits, packed into words."""

from __future__ import annotations

import re
from typing import Any

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    HEAD,
    PLAIN_HEAD,
    QuantizationSpec,
    SchemeRule,
    WeightScheme,
    plain_rules,
)

_PLAIN_BITS = 16
"""Bits of a module that auto-round has not quantized, or more."""


def read_gptq(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "gptq" or "gptq_v2"."""
    usual = "gptq_v2" if config.method == "gptq_v2" else "gptq"
    form = config.get("checkpoint_format", "format") or usual
    if form not in ("gptq", "gptq_v2"):
        config.refuse("checkpoint_format", f"is {form!r}; supported are 'gptq' and 'gptq_v2'")
    scheme = _scheme(config, offset=not config.flag("sym", default=True))
    rules = [_dynamic_rule(config, *one) for one in config.part("dynamic").items()]
    if config.get("lm_head") is None:
        rules.append(PLAIN_HEAD)
    elif not config.flag("lm_head"):
        rules += plain_rules([HEAD])
    return QuantizationSpec(method=form, rules=tuple(rules), default=scheme)


def _dynamic_rule(config: QuantConfig, pattern: str, values: Any) -> SchemeRule:
    """Return the rule of an entry: "+:regex" with other values, or "-:regex", not quantized."""
    sign, _, own = pattern.partition(":")
    if sign not in ("+", "-") or not own:
        sign, own = "+", pattern
    if sign == "-":
        return SchemeRule(pattern=own, scheme=None)
    return SchemeRule(pattern=own, scheme=_own_scheme(config, "dynamic", values))


def read_awq(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "awq"."""
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        config.refuse("version", f"is {version!r}; supported is 'gemm'")
    scheme = _scheme(config, offset=True, bits=(4,))
    rules = *plain_rules(config.names("modules_to_not_convert")), PLAIN_HEAD
    return QuantizationSpec(method="awq", rules=rules, default=scheme)


def read_auto_round(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "auto-round", whose files have another method's form."""
    config.choice("data_type", ("int",), "int")
    packing = str(config.get("packing_format") or "auto_round:auto_gptq")
    form = packing.rpartition(":")[2]
    if form in ("auto_gptq", "gptq"):
        found = read_gptq(config)
    elif form in ("auto_awq", "awq"):
        found = read_awq(config)
    else:
        config.refuse("packing_format", f"is {packing!r}; supported are auto_gptq and auto_awq")
    own = [_module_rule(config, *one) for one in config.part("extra_config").items()]
    return QuantizationSpec(method=found.method, rules=(*own, *found.rules), default=found.default)


def _module_rule(config: QuantConfig, name: str, values: Any) -> SchemeRule:
    """Return the rule of an entry of extra_config: a module's name, or a regular expression."""
    pattern = name if re.search(r"[*+?^$|()\[\]]", name) else re.escape(name) + "$"
    bits = values.get("bits") if isinstance(values, dict) else None
    if isinstance(bits, int) and bits >= _PLAIN_BITS:
        return SchemeRule(pattern=pattern, scheme=None)
    return SchemeRule(pattern=pattern, scheme=_own_scheme(config, "extra_config", values))


def _own_scheme(config: QuantConfig, name: str, values: Any) -> WeightScheme:
    """Return the scheme of some modules, whose values replace the common ones."""
    if not isinstance(values, dict):
        config.refuse(name, f"must have an object for each module, not {values!r}")
    common = {one: config.get(one) for one in ("bits", "group_size", "desc_act")}
    return _scheme(QuantConfig(f"{name} of {config.source}", {**common, **values}), offset=True)


def _scheme(config: QuantConfig, *, offset: bool, bits: tuple[int, ...] = (4, 8)) -> WeightScheme:
    """Return the scheme of bits and group_size, where -1 stands for all inputs."""
    found = config.whole("bits", "w_bit")
    if found not in bits:
        said = " and ".join(str(one) for one in bits)
        config.refuse("bits", f"is {found}; supported are {said}")
    size = config.whole("group_size", "q_group_size", default=128)
    if size < -1 or size == 0:
        config.refuse("group_size", f"is {size}; it must be -1, for all inputs, or positive")
    return WeightScheme(
        kind="int4" if found == 4 else "int8",
        columns=max(0, size),
        offset=offset,
        # Inputs of a group are then no neighbours.
        decoded=config.flag("desc_act") and size > 0,
    )
