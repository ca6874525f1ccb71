"""The bundled model with look-up drafts: the same outputs as without them, whatever is asked for.

Float32 on the CPU, where a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sidestep import LLM, SamplingParams, StructuredOutputsParams
from tests.e2e.engines import Engines

CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

"""
PROMPTS = [
    CODE,
    CODE + "class Queue:\n    def __init__(self):\n",
    "def main():\n",
    "import os\n\n\ndef read(path):\n",
    CODE + "# The same class again:\n" + CODE[:40],
]
FORMS = [
    StructuredOutputsParams(regex=r"(self\.items, ){4,8}"),
    StructuredOutputsParams(choice=["return self.items.pop()", "return None"]),
    StructuredOutputsParams(json={"type": "array", "items": {"enum": ["x", "xy"]}, "maxItems": 9}),
]


def make_params(number: int) -> SamplingParams:
    """Return the parameters of a request, which follow from its number alone."""
    rng = random.Random(number)
    asked: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.5]),
        "max_tokens": rng.randint(1, 40),
    }
    some: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.4},
        {"repetition_penalty": 1.2},
        {"logprobs": 2},
        {"logit_bias": {261: 2.0}},
        {"min_tokens": 8, "max_tokens": 30},
        {"stop_token_ids": [rng.randint(200, 400) for _ in range(60)]},
        {"stop": [rng.choice(["self", "item", "\n\n", "("])]},
        {"structured_outputs": rng.choice(FORMS), "max_tokens": 30},
        {"n": 2},
    ]
    for chosen in rng.sample(some, rng.choice([0, 1, 1, 2])):
        asked |= chosen
    if "structured_outputs" in asked:
        asked.pop("min_tokens", None)
    return SamplingParams(**asked, seed=number)


def outputs(llm: LLM, count: int) -> list[Any]:
    """Return what the readers of the first `count` requests get."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    made = llm.generate(prompts, [make_params(i) for i in range(count)], use_tqdm=False)
    return [
        [
            (
                one.token_ids,
                one.text,
                one.finish_reason,
                one.stop_reason,
                [{t: (e.rank, e.decoded_token) for t, e in d.items()} for d in one.logprobs or ()],
            )
            for one in request.outputs
        ]
        for request in made
    ]


SETTINGS = [
    {"method": "ngram", "num_speculative_tokens": 1},
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False},
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
    {
        "method": "synthetic",  # without an oracle: garbage
        "num_speculative_tokens": 4,
        "synthetic_acceptance_rate": 0.0,
        "adaptive": False,
    },
]


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Any]:
    """Return the outputs of requests without drafts."""
    return outputs(engines.get(), 60)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_outputs_are_the_same_with_drafts(
    engines: Engines, plain: list[Any], setting: dict[str, Any]
) -> None:
    drafted = engines.get(speculative_config=setting)
    for number, (got, wanted) in enumerate(zip(outputs(drafted, 60), plain, strict=True)):
        assert got == wanted, f"request {number}: {make_params(number)}"
    assert drafted.get_stats()["spec_decode_num_draft_tokens"] > 0


def test_two_ranks_accept_the_same_drafts(engines: Engines) -> None:
    drafted = engines.get(speculative_config=SETTINGS[1], tensor_parallel_size=2)
    assert outputs(drafted, 16) == outputs(engines.get(tensor_parallel_size=2), 16)


def test_all_stages_of_a_pipeline_know_what_was_accepted(
    engines: Engines, plain: list[Any]
) -> None:
    drafted = engines.get(speculative_config=SETTINGS[1], pipeline_parallel_size=3)
    assert outputs(drafted, 30) == plain[:30]
    assert drafted.get_stats()["spec_decode_num_accepted_tokens"] > 0
