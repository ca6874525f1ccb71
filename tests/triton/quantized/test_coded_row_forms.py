"""Forms of the kernel for one row of coded experts keep to a processor's memory and its rules."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sidestep.kernels.experts.row_form import (
    NOTHING_BEHIND,
    Behind,
    Choosing,
    Ending,
    Form,
    Matrix,
)

MEMORY = 227 << 10
"""Bytes that a block of Hopper may have."""


@st.composite
def forms(draw: st.DrawFn) -> Form:
    kind = draw(st.sampled_from(("fp8", "int8", "int4", "mxfp4")))
    chosen = draw(st.integers(1, 16))

    def matrix(columns: int) -> Matrix:
        group = 128 if kind == "mxfp4" else draw(st.sampled_from((0, 128, 256)))
        height = 1 if kind == "mxfp4" else draw(st.sampled_from((1, 8, 128)))
        return Matrix(columns, group, height, draw(st.booleans()))

    rows, split = 8 * draw(st.integers(1, 2000)), draw(st.sampled_from((1, 2, 4)))
    behind = Behind(rows, 0, 1, split, late=False) if draw(st.booleans()) else NOTHING_BEHIND
    return Form(
        torch.bfloat16,
        kind,
        kind == "int4",
        chosen,
        matrix(8 * draw(st.integers(1, 640))),
        matrix(8 * draw(st.integers(1, 640))),
        shares=draw(st.sampled_from((1, 2, 4))),
        blocks=draw(st.sampled_from((78, 114, 132))),
        activation=(False, None, None),
        choosing=Choosing(1, 512, 512, True),
        ending=Ending(True, True, False),
        behind=behind,
    )


@given(forms())
def test_forms_that_fit_keep_to_the_rules(form: Form) -> None:
    if not form.fits:
        return
    options = {name: int(value) for name, value in form.options.items() if isinstance(value, int)}
    stages, warps = options["STAGES"], options["WARPS"]
    parts = -(-form.gate_up.steps // options["GATE_AT_ONCE"])
    items = options["MOST_ITEMS"]
    # Barriers of slots and items, the experts' ids and weights, what is read before down's results
    # are there, and the inputs.
    fixed = 8 * (3 * stages + 1 + items) + 8 * form.chosen + 64 * items
    fixed += 256 * form.gate_up.steps
    assert form.shared + fixed <= MEMORY
    assert warps % parts == 0 and warps <= 16, "whole teams"
    assert options["HELD"] * warps <= 24, "registers hold no more steps"
    assert stages % (warps // parts) == 0, "all of a slot's items belong to one team"
    assert items == -(-form.gate_up.columns // (8 * form.blocks))
    assert items <= min(8, warps), "each item of down has a warp that finishes it"
    in_slot = max(1, form.gate_up.steps // form.down.steps) * 2
    assert items * -(-form.chosen // in_slot) <= stages, "a block has room for all items of down"


def test_experts_of_known_models_fit() -> None:
    """The sizes of Qwen3-30B-A3B, gpt-oss-20b and Qwen3-Next-80B-A3B, on an H200."""
    for kind, height, chosen, width, inner in (
        ("fp8", 1, 8, 2048, 768),
        ("fp8", 128, 8, 2048, 768),
        ("mxfp4", 1, 4, 2880, 2880),
        ("fp8", 128, 11, 2048, 512),
    ):
        form = Form(
            torch.bfloat16,
            kind,
            False,
            chosen,
            Matrix(width, 128, height, False),
            Matrix(inner, 128, height, False),
            shares=1,
            blocks=132,
            activation=(False, None, None),
            choosing=Choosing(),
            ending=Ending(True, True, False),
        )
        assert form.fits
