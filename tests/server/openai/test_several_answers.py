"""best_of, beam search and the logprobs of several choices over HTTP.

They equal the engine's results, or are refused.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import LiveServer
from tests.server.openai.test_fields import refusal

PROMPT = "def get_name("


def complete(server: LiveServer, **fields: Any) -> Any:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 10, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_best_of_returns_the_most_probable_of_those_it_makes(tiny: LiveServer) -> None:
    options = {"seed": 4, "temperature": 1.5, "logprobs": 0}
    every = complete(tiny, n=5, **options)
    some = complete(tiny, n=2, best_of=5, **options)
    ranked = sorted(every["choices"], key=lambda c: -sum(c["logprobs"]["token_logprobs"]))
    assert [c["text"] for c in some["choices"]] == [c["text"] for c in ranked[:2]]
    assert [c["index"] for c in some["choices"]] == [0, 1]
    assert some["usage"] == every["usage"] | {
        "prompt_tokens_details": some["usage"]["prompt_tokens_details"]
    }
    two = {"n": 2, "seed": 4, "temperature": 1}
    assert complete(tiny, best_of=2, **two)["choices"] == complete(tiny, **two)["choices"]


def test_beam_search_finds_the_most_probable(tiny: LiveServer) -> None:
    beams = complete(tiny, n=3, use_beam_search=True, ignore_eos=True)
    assert [c["index"] for c in beams["choices"]] == [0, 1, 2]
    assert len({c["text"] for c in beams["choices"]}) == 3
    assert beams["usage"]["completion_tokens"] == 30
    assert {c["finish_reason"] for c in beams["choices"]} == {"length"}
    one = complete(tiny, n=1, use_beam_search=True, ignore_eos=True, temperature=0)
    assert (
        one["choices"][0]["text"]
        == complete(tiny, temperature=0, ignore_eos=True)["choices"][0]["text"]
    )
    two = complete(
        tiny,
        prompt=[PROMPT, "class Stack:"],
        n=2,
        use_beam_search=True,
        early_stopping=True,
        length_penalty=0.5,
    )
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"use_beam_search": True, "n": 65}, "beam_width"),
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "seed": 1}, "seed"),
        ({"use_beam_search": True, "logprobs": 0}, "logprobs"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "best_of": 4}, "best_of"),
        ({"use_beam_search": True, "temperature_last": True}, "temperature_last"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "early_stopping": "x"}, "early_stopping"),
    ],
)
def test_what_has_no_meaning_is_refused(
    fields: dict[str, Any], param: str, fake: LiveServer
) -> None:
    assert refusal(fake, "/v1/completions", {"prompt": "a", **fields})["param"] == param


def test_every_choice_has_the_prompts_logprobs(tiny: LiveServer) -> None:
    made = complete(tiny, n=3, seed=1, temperature=1, prompt_logprobs=1, echo=True, logprobs=1)
    first, *others = (c["prompt_logprobs"] for c in made["choices"])
    assert first[0] is None and len(first) > 3 and all(other == first for other in others)
    numbers = [c["logprobs"]["token_logprobs"][: len(first)] for c in made["choices"]]
    assert numbers[0] == numbers[1] == numbers[2] and numbers[0][1] is not None


@pytest.mark.parametrize(
    ("prompts", "field", "problem"),
    [
        ([[5], [6], [1 << 20]], "prompt[2]", "1048576 is not a token id"),
        ([[5], [6] * 5000], "prompt[1]", "prompt[1] resulted in 5000 tokens"),
    ],
)
def test_a_wrong_prompt_among_several_is_named(
    prompts: Any, field: str, problem: str, fake: LiveServer
) -> None:
    error = refusal(fake, "/v1/completions", {"prompt": prompts, "max_tokens": 2})
    assert problem in error["message"] and error["param"] == field
