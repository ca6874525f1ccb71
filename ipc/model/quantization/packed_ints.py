"""GPTQ and AWQ: whole numbers of 4 or 8 bits, packed into words."""

from __future__ import annotations

from typing import Any

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import (
    QuantizationSpec,
    SchemeRule,
    WeightScheme,
    plain_rules,
)


def read_gptq(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "gptq"."""
    return _read_gptq(config, "gptq")


def _read_gptq(config: QuantConfig, method: str) -> QuantizationSpec:
    format_ = config.get("checkpoint_format", "format") or "gptq"
    if format_ not in ("gptq", "gptq_v2"):
        config.refuse("checkpoint_format", f"is {format_!r}; supported are 'gptq' and 'gptq_v2'")
    scheme = _scheme(config, offset=not config.flag("sym", default=True))
    dynamic = config.part("dynamic") if config.get("dynamic") is not None else None
    rules = () if dynamic is None else tuple(_dynamic_rule(config, *one) for one in dynamic.items())
    name = "gptq_v2" if format_ == "gptq_v2" else method
    return QuantizationSpec(method=name, rules=rules, default=scheme)


def _dynamic_rule(config: QuantConfig, pattern: str, values: Any) -> SchemeRule:
    """Return the rule of an entry: "+:regex" with other values, or "-:regex", not quantized."""
    sign, _, own = pattern.partition(":")
    if sign not in ("+", "-") or not own:
        sign, own = "+", pattern
    if sign == "-":
        return SchemeRule(pattern=own, scheme=None)
    given = {"bits": config.get("bits"), "group_size": config.get("group_size")}
    whole = QuantConfig(f"dynamic of {config.source}", {**given, **dict(values)})
    return SchemeRule(pattern=own, scheme=_scheme(whole, offset=True))


def read_awq(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "awq"."""
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        config.refuse("version", f"is {version!r}; supported is 'gemm'")
    scheme = _scheme(config, offset=True, bits=(4,))
    rules = plain_rules(config.names("modules_to_not_convert"))
    return QuantizationSpec(method="awq", rules=rules, default=scheme)


def read_auto_round(config: QuantConfig) -> QuantizationSpec:
    """Read an object with quant_method "auto-round", whose files have another method's form."""
    packing = str(config.get("packing_format") or "auto_round:auto_gptq")
    form = packing.rpartition(":")[2]
    if form in ("auto_gptq", "gptq"):
        return _read_gptq(config, "gptq")
    if form in ("auto_awq", "awq"):
        return read_awq(config)
    config.refuse("packing_format", f"is {packing!r}; supported are auto_gptq and auto_awq")


def _scheme(config: QuantConfig, *, offset: bool, bits: tuple[int, ...] = (4, 8)) -> WeightScheme:
    """Return the scheme of bits and group_size, where -1 stands for all inputs."""
    found = config.whole("bits", "w_bit")
    if found not in bits:
        said = " and ".join(str(one) for one in bits)
        config.refuse("bits", f"is {found}; supported are {said}")
    size = config.whole("group_size", "q_group_size", default=128)
    return WeightScheme(kind="int4" if found == 4 else "int8", columns=max(0, size), offset=offset)
