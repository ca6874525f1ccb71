"""Quantization of plain weights while they are loaded."""

from __future__ import annotations

from sidestep.ipc.model.quantization.weight_scheme import (
    HEAD,
    QuantizationSpec,
    SchemeRule,
    WeightScheme,
    plain_rules,
)

ONLINE: dict[str, WeightScheme] = {
    "fp8": WeightScheme(kind="fp8", activations="fp8"),
    "int8": WeightScheme(kind="int8"),
    "int4": WeightScheme(kind="int4", columns=32, offset=True, fitted=True),
}
"""Name of the option's choice -> the form that matrices get."""
_OF_EXPERTS: dict[str, WeightScheme] = {
    "int4": WeightScheme(kind="int4", columns=32, offset=True),
}
"""The same for experts, where it is another: kernels of experts take no minimums."""
_EXPERTS = r".*experts?\."
"""Pattern of the names of experts' matrices, and of a shared one's."""


def online_quantization(choice: str) -> QuantizationSpec:
    """Return the quantization of all matrices of products but the output head."""
    own = _OF_EXPERTS.get(choice)
    rules = plain_rules([HEAD])
    if own is not None:
        rules += (SchemeRule(pattern=_EXPERTS, scheme=own),)
    return QuantizationSpec(method="online", rules=rules, default=ONLINE[choice], online=True)
