"""Logprobs through the whole engine equal those of transformers on the bundled model."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sidestep import (
    DEFAULT_MODEL,
    LLM,
    AsyncLLM,
    EngineArgs,
    Logprob,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from tests.e2e.engines import Engines
from tests.e2e.models import RandomModel, load_reference, random_prompts

PROMPTS = [
    "def get_name(self):\n    return",
    "import",
    "class Stack:\n    def push(self, it):\n        self.it." * 6,
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": False},
    {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"num_kv_blocks": 10, "max_model_len": 160},
    {"tensor_parallel_size": 2},
]


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    # Run twice: the second time all prompts are cached.
    llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
    return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_reference(DEFAULT_MODEL)


@torch.inference_mode()
def reference(model: Any, tokens: list[int]) -> torch.Tensor:
    """Return the log-probabilities of each token's successors, [T, V]."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits
    return logits[0].float().log_softmax(-1)


def check(entries: dict[int, Logprob], values: torch.Tensor, token: int, most: int) -> None:
    """Check one token's logprobs against the reference [V]."""
    assert next(iter(entries)) == token
    best = values.topk(most).indices.tolist()
    assert list(entries) == [token, *(t for t in best if t != token)]
    for each, found in entries.items():
        assert found.logprob == pytest.approx(float(values[each]), abs=1e-4)
        assert found.rank == int((values > values[each]).sum()) + 1


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logprobs_of_outputs_and_prompts(
    options: dict[str, Any], model: Any, engines: Engines
) -> None:
    """Cover prompts in chunks, preemption, and two ranks.

    The logprobs are the model's own, although penalties and filters choose the tokens.
    """
    params = [
        SamplingParams(temperature=0, max_tokens=9, logprobs=4, prompt_logprobs=2),
        SamplingParams(
            temperature=1.2, seed=5, top_p=0.9, presence_penalty=1.5, max_tokens=9, logprobs=20
        ),
        SamplingParams(
            temperature=0.8, seed=6, max_tokens=9, logprobs=0, prompt_logprobs=0, min_tokens=9
        ),
    ]
    outputs = run(engines.get(**options), params)
    for output, asked in zip(outputs, params, strict=True):
        completion, prompt = output.outputs[0], output.prompt_token_ids
        values = reference(model, [*prompt, *completion.token_ids])
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids)
        for i, (token, entries) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            check(entries, values[len(prompt) + i - 1], token, asked.logprobs or 0)
        total = sum(
            e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)
        )
        assert completion.cumulative_logprob == pytest.approx(total)
        if asked.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for i, prompt_entries in enumerate(output.prompt_logprobs[1:], 1):
            assert prompt_entries is not None
            check(prompt_entries, values[i - 1], prompt[i], asked.prompt_logprobs)


def test_who_does_not_ask_gets_the_same_tokens_and_no_logprobs(engines: Engines) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=12)
    asking = SamplingParams(temperature=0.9, seed=3, max_tokens=12, logprobs=3, prompt_logprobs=1)
    plain = run(engines.get(), [params] * 3)
    mixed = run(engines.get(), [params, asking, params])
    assert [o.outputs[0].token_ids for o in mixed] == [o.outputs[0].token_ids for o in plain]
    assert [o.outputs[0].logprobs is None for o in mixed] == [True, False, True]
    assert mixed[0].prompt_logprobs is None and mixed[0].outputs[0].cumulative_logprob is None


async def test_streamed() -> None:
    """Each output of a stream has the logprobs of its own tokens.

    Together they equal the logprobs of the whole.
    """
    params = SamplingParams(
        temperature=0, max_tokens=20, logprobs=2, prompt_logprobs=1, stop=["\n\n"]
    )
    delta = SamplingParams(
        temperature=0,
        max_tokens=20,
        logprobs=2,
        prompt_logprobs=1,
        stop=["\n\n"],
        output_kind=RequestOutputKind.DELTA,
    )
    async with AsyncLLM.from_engine_args(EngineArgs(dtype="float32")) as llm:
        whole = [output async for output in llm.generate(PROMPTS[2], params)][-1]
        parts = []
        async for output in llm.generate(PROMPTS[2], delta):
            parts.append(output)
            await asyncio.sleep(0)
    assert all(len(p.outputs[0].logprobs or []) == len(p.outputs[0].token_ids) for p in parts)
    assert [e for p in parts for e in p.outputs[0].logprobs or []] == whole.outputs[0].logprobs
    assert parts[-1].outputs[0].cumulative_logprob == whole.outputs[0].cumulative_logprob
    assert parts[0].prompt_logprobs == whole.prompt_logprobs
    assert all(p.prompt_logprobs is None for p in parts[1:])


def test_texts_of_single_tokens(engines: Engines) -> None:
    llm = engines.get()
    tokenizer = llm.get_tokenizer()
    text = "naïve café = '日本' + \"\\n\"  # ✓\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    output = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert output.prompt_logprobs is not None
    for token, entries in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entries is not None
        assert entries[token].decoded_token == tokenizer.token_bytes(token).decode(
            "utf-8", "replace"
        )


def test_the_documentation_s_example_runs(
    capsys: pytest.CaptureFixture[str], engines: Engines
) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "sampling.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {"llm": engines.get(), "SamplingParams": SamplingParams})
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize("family", ["gemma3", "granite-tied"])
def test_logprobs_of_models_with_a_factor_or_a_bound_on_their_logits(
    family: str, random_model: RandomModel
) -> None:
    path, model = random_model(family)
    prompt = random_prompts(1, model.config.vocab_size)[0]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3)
    with LLM(path, device="cpu", dtype="float32", cpu_threads=1) as llm:
        (out,) = llm.generate([prompt], params, use_tqdm=False)
    tokens = out.outputs[0].token_ids
    values = reference(model, [*prompt, *tokens])
    for token, entries, row in zip(
        tokens, out.outputs[0].logprobs or [], values[len(prompt) - 1 : -1], strict=True
    ):
        check(entries, row, token, 3)
