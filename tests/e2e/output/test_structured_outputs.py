"""The bundled model with structured outputs.

The tokens are the same with and without overlap, on one rank and on two. Plain requests beside them
give the same tokens as alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sidestep import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.engines import Engines

ROOT = Path(__file__).resolve().parents[3]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["name", "arguments", "pure"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "pure": {"type": "boolean"},
        "arguments": {"type": "array", "items": {"enum": ["x", "y", "self"]}, "maxItems": 3},
    },
}
PROMPT = "def add(x, y):\n"
FORMS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=r"return [xy] [-+*/] [xy]\n"),
    None,
    StructuredOutputsParams(choice=["pass", "return x + y", "raise"]),
    None,
    StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
]


def outputs(llm: LLM) -> list[tuple[str, list[int], str | None]]:
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=200 if form else 24, structured_outputs=form
        )
        for temperature in (0.0, 1.0)
        for i, form in enumerate(FORMS)
    ]
    return [
        (o.outputs[0].text, o.outputs[0].token_ids, o.outputs[0].finish_reason)
        for o in llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    ]


def test_the_docs_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "structured-outputs.md").read_text(), re.DOTALL
    )
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("{'name': "), done


@pytest.fixture(scope="module")
def overlapped(engines: Engines) -> list[tuple[str, list[int], str | None]]:
    return outputs(engines.get())


def test_answers_are_of_their_form(overlapped: list[tuple[str, list[int], str | None]]) -> None:
    for (text, _, reason), form in zip(overlapped, [*FORMS, *FORMS], strict=True):
        if form is None:
            continue
        assert reason == "stop"
        if form.kind == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif form.regex:
            assert re.fullmatch(form.regex, text)
        else:
            assert text in (form.choice or ())


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": False},
        {"tensor_parallel_size": 2},
        {"max_num_seqs": 3, "num_kv_blocks": 40, "max_model_len": 260},
    ],
    ids=str,
)
def test_tokens_are_the_same_however_it_is_run(
    options: dict[str, Any], overlapped: list[tuple[str, list[int], str | None]], engines: Engines
) -> None:
    assert outputs(engines.get(**options)) == overlapped


def test_plain_neighbours_are_those_of_a_plain_batch(
    overlapped: list[tuple[str, list[int], str | None]], engines: Engines
) -> None:
    plain = [i for i, form in enumerate([*FORMS, *FORMS]) if form is None]
    params = [
        SamplingParams(temperature=float(i >= len(FORMS)), seed=i % len(FORMS), max_tokens=24)
        for i in plain
    ]
    alone = [
        o.outputs[0].token_ids
        for o in engines.get().generate([PROMPT] * len(plain), params, use_tqdm=False)
    ]
    assert [overlapped[i][1] for i in plain] == alone
