"""Structured outputs on a GPU.

The tokens are the same with and without overlap, captured and eager. Plain rows beside them do not
change.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sidestep import LLM, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.gpu

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "n"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
}
FORMS = [
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputsParams(regex="[a-c]{5,9}x"),
    None,
    StructuredOutputsParams(choice=["pass", "return x + y", "raise"]),
]


def outputs(
    forms: list[StructuredOutputsParams | None], **options: Any
) -> list[tuple[str, list[int]]]:
    """Run 72 requests: more rows with a grammar than are copied to float32 at a time."""
    params = [
        SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=150 if form else 30, structured_outputs=form
        )
        for i, form in enumerate(forms)
    ]
    with LLM(dtype="float32", kv_cache_memory_bytes=1 << 30, **options) as llm:
        return [
            (o.outputs[0].text, o.outputs[0].token_ids)
            for o in llm.generate(["def f(x, y):\n"] * len(params), params, use_tqdm=False)
        ]


def test_answers_keep_to_their_forms_however_steps_run() -> None:
    forms = FORMS * 24
    first = outputs(forms)
    for (text, _), form in zip(first, forms, strict=True):
        if form is None:
            continue
        if form.kind == "json":
            assert json.loads(text).keys() == {"name", "n"}
        else:
            assert re.fullmatch(form.regex, text) if form.regex else text in (form.choice or ())
    for options in (
        {"async_scheduling": False},
        {"enforce_eager": True},
        {
            "max_num_seqs": 7,
            "max_num_batched_tokens": 48,
            "block_size": 16,
            "num_kv_blocks": 40,
            "max_model_len": 400,
        },
    ):
        assert outputs(forms, **options) == first


def test_plain_neighbours_do_not_change() -> None:
    mixed = outputs(FORMS * 6)
    plain = outputs([None] * 24)
    assert [mixed[i] for i in range(2, 24, 4)] == [plain[i] for i in range(2, 24, 4)]


def test_forms_with_other_controls_sample_the_same_tokens() -> None:
    """Cover rows with a grammar alone and with other controls.

    The step's own kernels sample the former from the model's type; the latter are sampled from
    float32.
    """
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=60, structured_outputs=form, **more)
        for more in ({}, {"logprobs": 1}, {"logit_bias": {0: 1e-30}})
        for i, form in enumerate(form for form in FORMS if form is not None)
    ]
    with LLM(dtype="float32", kv_cache_memory_bytes=1 << 30) as llm:
        found = [
            output.outputs[0].token_ids
            for output in llm.generate(["def f(x, y):\n"] * len(params), params, use_tqdm=False)
        ]
    third = len(found) // 3
    assert found[:third] == found[third : 2 * third] == found[2 * third :]
