"""Quantization of plain weights while they are loaded."""

from __future__ import annotations

from sidestep.ipc.model.quantization.weight_scheme import (
    HEAD,
    QuantizationSpec,
    WeightScheme,
    plain_rules,
)

ONLINE: dict[str, WeightScheme] = {
    "fp8": WeightScheme(kind="fp8", activations="fp8"),
    "int8": WeightScheme(kind="int8"),
    "int4": WeightScheme(kind="int4", columns=32, offset=True, fitted=True),
}
"""Name of the option's choice -> the form that matrices get."""


def online_quantization(choice: str) -> QuantizationSpec:
    """Return the quantization of all matrices of products but the output head."""
    return QuantizationSpec(
        method="online", rules=plain_rules([HEAD]), default=ONLINE[choice], online=True
    )
