"""Quantization of plain weights while they are loaded."""

from __future__ import annotations

import msgspec

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
HEAD_CHOICES = ("auto", "none", "fp8", "int8")
"""Choices for the output head; see with_head."""


def online_quantization(choice: str) -> QuantizationSpec:
    """Return the quantization of all matrices of products; the output head's has 8 bits."""
    own = _OF_EXPERTS.get(choice)
    rules = plain_rules([HEAD])
    if own is not None:
        rules += (SchemeRule(pattern=_EXPERTS, scheme=own),)
    head = ONLINE["fp8" if choice == "fp8" else "int8"]
    return QuantizationSpec(
        method="online", rules=rules, default=ONLINE[choice], online=True, head=head
    )


def with_head(spec: QuantizationSpec | None, choice: str) -> QuantizationSpec | None:
    """Return the quantization, with the output head in the form that the user chose.

    "auto" leaves it as it is: rounded where plain matrices are, else as the files have it. "none"
    rounds no head.
    """
    if choice == "auto":
        return spec
    if choice == "none":
        return None if spec is None else msgspec.structs.replace(spec, head=None)
    return msgspec.structs.replace(
        spec or QuantizationSpec(method="online", online=True), head=ONLINE[choice]
    )
