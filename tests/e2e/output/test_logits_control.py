"""Penalties, biases and masks through the whole engine.

The results equal plain arithmetic on transformers' logits, whatever runs beside a request and
however it is run.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from examples.logits_processor import TokenRamp
from sidestep import (
    DEFAULT_MODEL,
    LLM,
    EngineDeadError,
    EngineStartError,
    RequestError,
    SamplingParams,
    ValidationError,
)
from tests.e2e.engines import Engines
from tests.e2e.models import (
    RandomModel,
    load_reference,
    random_prompts,
    reference_tokens,
    write_model,
)
from tests.e2e.output.control import reference_greedy, reference_pairs

CONTROLS: list[dict[str, Any]] = [
    {"presence_penalty": 2.0, "logit_bias": {5: 40.0, 6: 39.0, 7: 38.5}},
    {"repetition_penalty": 4.0},
    {"frequency_penalty": 1.3, "logit_bias": {5: 40.0, 6: 39.0, 7: 38.5}},
    {"presence_penalty": -2.0, "frequency_penalty": -1.0, "repetition_penalty": 0.4},
    {"allowed_token_ids": [3, 200, 100, 7]},
    {"allowed_token_ids": [3, 200, 100, 7], "repetition_penalty": 9.0},
    {"logit_bias": {5: 30.0, 6: 29.0}, "frequency_penalty": 2.0},
    {"logit_bias": {9: 100.0}, "presence_penalty": 1.0, "repetition_penalty": 50.0},
]


def run(
    path: str, prompts: Sequence[list[int]], params: Sequence[SamplingParams], **options: Any
) -> list[list[int]]:
    with LLM(path, **{"device": "cpu", "dtype": "float32", "cpu_threads": 1, **options}) as llm:
        return [
            out.outputs[0].token_ids for out in llm.generate(prompts, list(params), use_tqdm=False)
        ]


def requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests of which every second one is plain."""
    prompts = random_prompts(16, vocab_size, longest=50)
    controls = [CONTROLS[i // 2] if i % 2 else {} for i in range(16)]
    params = [
        SamplingParams(temperature=0, max_tokens=12 + i % 5, ignore_eos=True, **control)
        for i, control in enumerate(controls)
    ]
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False, "max_num_batched_tokens": 24, "max_num_seqs": 6},
        {"num_kv_blocks": 40, "block_size": 4, "max_model_len": 100},
        {"tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_greedy_tokens_equal_plain_arithmetic(
    options: dict[str, Any],
    random_model: RandomModel,
    arithmetic: list[list[int]],
    engines: Engines,
) -> None:
    """Cover two steps in flight, prompts in chunks, preemption, and two ranks."""
    path, model = random_model("llama-gqa")
    prompts, params = requests(model.config.vocab_size)
    answers = engines.get(path, **options).generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in answers] == arithmetic


@pytest.fixture(scope="module")
def arithmetic(random_model: RandomModel) -> list[list[int]]:
    """Return the right answers of all requests, by plain arithmetic."""
    _, model = random_model("llama-gqa")
    prompts, params = requests(model.config.vocab_size)
    expected = [
        reference_greedy(model, prompt, p) for prompt, p in zip(prompts, params, strict=True)
    ]
    plain = reference_tokens(model, prompts, [p.max_tokens or 0 for p in params])
    assert expected[::2] == plain[::2]
    assert all(a != b for a, b in zip(expected[1::2], plain[1::2], strict=True)), (
        "a control has no effect"
    )
    return expected


NUM_DRAWS = 700


@pytest.fixture(scope="module")
def bundled() -> PreTrainedModel:
    """Return the bundled model as transformers runs it."""
    return load_reference(DEFAULT_MODEL)


@pytest.mark.parametrize(
    "control",
    [
        {},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
        {"min_p": 0.4},
        {"logit_bias": {40: 0.7, 41: -0.4}, "presence_penalty": 0.5},
        {"logit_bias": {40: 0.7, 41: -0.4}, "top_k": 2},
        {"logit_bias": {40: 0.7, 41: -0.4}, "top_p": 0.6},
        {"logit_bias": {40: 0.7, 41: -0.4}, "min_p": 0.4, "temperature_last": True},
    ],
    ids=str,
)
def test_frequencies_of_the_first_two_tokens(
    control: dict[str, Any], engines: Engines, bundled: PreTrainedModel
) -> None:
    """Compare the frequencies of NUM_DRAWS draws of a pair by chi-square.

    The penalties make the second token of a pair depend on the first. Steps in turn draw the same
    tokens as steps in flight.
    """
    prompt = [300, 41, 17]
    common: dict[str, Any] = {
        "allowed_token_ids": [40, 41, 42],
        "temperature": 1.7,
        "max_tokens": 2,
        "ignore_eos": True,
    }
    flat = {"logit_bias": flatten(bundled, prompt, common["allowed_token_ids"])}
    for token, bias in control.get("logit_bias", {}).items():
        flat["logit_bias"][token] += bias
    params = {**common, **control, **flat}
    asked = [SamplingParams(**params, seed=i) for i in range(NUM_DRAWS)]
    expected = reference_pairs(bundled, prompt, asked[0])

    def draw(params: list[SamplingParams], **options: Any) -> list[tuple[int, ...]]:
        outputs = engines.get(**options).generate([prompt] * len(params), params, use_tqdm=False)
        return [tuple(out.outputs[0].token_ids) for out in outputs]

    draws = draw(asked)
    assert draw(asked[:100], async_scheduling=False) == draws[:100]
    seen = Counter(draws)
    possible = [pair for pair, p in expected.items() if p > 0]
    assert set(seen) <= set(possible)
    wanted = NUM_DRAWS * torch.tensor([expected[pair] for pair in possible], dtype=torch.float64)
    assert wanted.min() > 5
    statistic = ((torch.tensor([seen[pair] for pair in possible]) - wanted) ** 2 / wanted).sum()
    assert (
        torch.special.gammaincc(torch.tensor((len(possible) - 1) / 2), statistic.float() / 2) > 1e-3
    )


@torch.inference_mode()
def flatten(model: Any, prompt: list[int], tokens: Sequence[int]) -> dict[int, float]:
    """Return biases that make these tokens about equally probable.

    All pairs can then be counted.
    """
    logits = model(torch.tensor([prompt])).logits[0, -1].float()
    return {token: float(logits.max() - logits[token]) for token in tokens}


def test_seeded_tokens_do_not_depend_on_the_batch(
    random_model: RandomModel, engines: Engines
) -> None:
    path, _ = random_model("llama-gqa")
    prompts, _ = requests(331)

    def answers(some: slice, **options: Any) -> list[list[int]]:
        outputs = engines.get(path, **options).generate(prompts[some], params[some], use_tqdm=False)
        return [out.outputs[0].token_ids for out in outputs]

    params = [
        SamplingParams(temperature=1.1, top_p=0.9, seed=i, max_tokens=10, **CONTROLS[i // 2])
        for i in range(16)
    ]
    together = answers(slice(None))
    apart = [
        answers(slice(i, None, 5), max_num_seqs=2, async_scheduling=i % 2 == 0) for i in range(5)
    ]
    assert [apart[i % 5][i // 5] for i in range(16)] == together


def test_bad_words_never_come(engines: Engines) -> None:
    """Check the text: it never contains the words, whatever else the model says."""
    llm, params = engines.get(), SamplingParams(temperature=0, max_tokens=40)
    before = (
        llm.generate("def get_name(self):\n    return", params, use_tqdm=False)[0].outputs[0].text
    )
    words = sorted({word for word in before.split() if word.isidentifier()})
    assert words
    params = SamplingParams(temperature=0, max_tokens=40, bad_words=words)
    after = (
        llm.generate("def get_name(self):\n    return", params, use_tqdm=False)[0].outputs[0].text
    )
    assert not set(words) & set(after.split())


ROOT = Path(__file__).resolve().parents[3]
RAMP = "examples.logits_processor:TokenRamp"


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": False}, {"num_kv_blocks": 24, "block_size": 4, "max_model_len": 90}],
    ids=str,
)
def test_a_processor_of_the_users(options: dict[str, Any], random_model: RandomModel) -> None:
    """Run the example's processor, which counts outputs, also over preemptions.

    Plain requests run beside it.
    """
    path, model = random_model("llama-gqa")
    prompts = random_prompts(8, model.config.vocab_size, longest=40)
    wishes = [{"token": 11, "step": 4.0}, {"token": 12, "step": 9.0}]
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=14,
            ignore_eos=True,
            extra_args={TokenRamp.__name__: wishes[i // 4]} if i % 2 else None,
        )
        for i in range(8)
    ]
    expected = reference_tokens(model, prompts, [14] * 8)
    with torch.inference_mode():
        for i in range(1, 8, 2):
            expected[i] = []
            for length in range(14):
                logits = model(torch.tensor([prompts[i] + expected[i]])).logits[0, -1]
                logits[wishes[i // 4]["token"]] += wishes[i // 4]["step"] * length
                expected[i].append(int(logits.argmax()))
    assert run(path, prompts, params, logits_processors=[RAMP], **options) == expected


@pytest.mark.parametrize(
    ("stages", "error", "cause"),
    [
        (1, RequestError, "the engine cannot compute this request: worker 0 failed: KeyError"),
        (2, EngineDeadError, r"worker 1 \(stage 1\) failed: KeyError: 'step'"),
    ],
)
def test_an_exception_in_a_processor_has_its_cause(
    stages: int, error: type[Exception], cause: str, model_folder: Path
) -> None:
    """Raise in the last stage.

    With one rank the request ends alone. The stages before the last fail when it has gone.
    """
    wrong = SamplingParams(extra_args={TokenRamp.__name__: {"token": 3}})
    with pytest.raises(error, match=f"^{cause}"):
        run(
            write_model("llama-gqa", model_folder),
            [[1, 2]],
            [wrong],
            logits_processors=[RAMP],
            pipeline_parallel_size=stages,
            restart_limit=0,
        )


def test_the_example_s_program_runs() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.logits_processor"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    plain, urged = map(ast.literal_eval, ran.stdout.splitlines())
    assert len(urged) < len(plain)


def test_processors_that_are_not_there(model_folder: Path) -> None:
    path = write_model("llama-gqa", model_folder)
    with pytest.raises(
        EngineStartError, match=r"logits_processors: examples\.nothing:Ramp cannot be made"
    ):
        run(path, [], [], logits_processors=["examples.nothing:Ramp"])
    with pytest.raises(
        EngineStartError, match="logits_processors: builtins:repr is not a LogitsProcessor"
    ):
        run(path, [], [], logits_processors=["builtins:repr"])
    with pytest.raises(
        ValidationError, match="extra_args: 'TokenRamp' is no logits processor of this engine"
    ):
        run(path, [[1]], [SamplingParams(extra_args={"TokenRamp": {}})])
